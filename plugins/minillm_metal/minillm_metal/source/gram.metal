  // alpha X X^T + beta X + gamma I of a batch of matrices: the 32 x 32 tiles on and below the diagonal, each
  // written twice. 8 rows a simdgroup, 32 columns of X at a time.
  //
  // T: dtype. ADD: whether beta X is added; X is square and symmetric then.
  // x (N, R, C); sizes: R, C; numbers: alpha, beta, gamma -> y (N, R, R)
  threadgroup T left[32 * 36];   // 4 more than 32: rows start in other banks
  threadgroup T right[32 * 36];
  const int rows = sizes[0];
  const int columns = sizes[1];
  const uint index = thread_index_in_threadgroup;
  const uint lane = thread_index_in_simdgroup;
  const uint own = simdgroup_index_in_threadgroup * 8;
  const size_t matrix = size_t(threadgroup_position_in_grid.y) * size_t(rows) * size_t(columns);
  // Tiles are counted along the rows of the lower triangle.
  const int tile = int(threadgroup_position_in_grid.x);
  int down = int((sqrt(8.0f * float(tile) + 1.0f) - 1.0f) / 2.0f);
  while ((down + 1) * (down + 2) / 2 <= tile) down++;
  while (down * (down + 1) / 2 > tile) down--;
  const int top = down * 32;
  const int side = (tile - down * (down + 1) / 2) * 32;

  Fragment sums[4];
  for (int n = 0; n < 4; n++) sums[n] = Fragment(0.0f, 0.0f);
  for (int start = 0; start < columns; start += 32) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < 1024; i += 128) {
      const int row = int(i / 32);
      const int column = start + int(i % 32);
      T a = T(0.0f);
      T b = T(0.0f);
      if (column < columns && top + row < rows) a = x[matrix + size_t(top + row) * columns + column];
      if (column < columns && side + row < rows) b = x[matrix + size_t(side + row) * columns + column];
      left[row * 36 + int(i % 32)] = a;
      right[row * 36 + int(i % 32)] = b;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int c = 0; c < 32; c += 8) {
      const Fragment mine = loaded<T>(left, 36, own, c, lane);
      for (int n = 0; n < 4; n++) {
        sums[n] = multiply_add(mine, loaded_transposed<T>(right, 36, c, n * 8, lane), sums[n]);
      }
    }
  }
  const size_t result = size_t(threadgroup_position_in_grid.y) * size_t(rows) * size_t(rows);
  const int row = top + int(own + lane_row(lane));
  for (int n = 0; n < 4; n++) {
    for (int e = 0; e < 2; e++) {
      const int column = side + n * 8 + int(lane_column(lane)) + e;
      if (row >= rows || column >= rows || column > row) continue;
      float value = numbers[0] * sums[n][e];
      if (ADD) value += numbers[1] * float(x[matrix + size_t(row) * columns + column]);
      if (column == row) value += numbers[2];
      y[result + size_t(row) * rows + column] = T(value);
      if (column < row) y[result + size_t(column) * rows + row] = T(value);
    }
  }
