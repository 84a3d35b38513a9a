  // Each pair (a, b) = (x[i], x[i + D/2]) of a head, turned by its position's angle; one pair a lane.
  //
  // T: dtype. ROWS: 0 positions are 0 .. T-1, 1 they are given for a row (T,), 2 for each row (B, T).
  // x (B, T, H, D); cosines and sines float32 (P, D/2); positions int32
  // sizes: B T, T, H, D, 1 or, to turn back, for the gradient, -1. -> y as x
  const int half_size = sizes[3] / 2;
  const int pairs = sizes[2] * half_size;  // of a position
  const int token = int(threadgroup_position_in_grid.x);
  const int pair = int(threadgroup_position_in_grid.y * threads_per_threadgroup.x + thread_index_in_threadgroup);
  if (pair >= pairs || token >= sizes[0]) return;
  const int within = token % sizes[1];
  const int position = ROWS == 0 ? within : int(positions[ROWS == 1 ? within : token]);
  const int i = pair % half_size;
  const size_t angle = size_t(position) * size_t(half_size) + i;
  const size_t at = (size_t(token) * sizes[2] + pair / half_size) * size_t(sizes[3]) + i;
  const float c = cosines[angle];
  const float s = float(sizes[4]) * float(sines[angle]);
  const float a = float(x[at]);
  const float b = float(x[at + half_size]);
  y[at] = T(a * c - b * s);
  y[at + half_size] = T(b * c + a * s);
