  // Gradients of y = w x / sqrt(mean(x^2) + eps), for rows group, group + groups, ... of a threadgroup: those of
  // x, and the sum over these rows of those of w. A row is read once; lanes hold EACH of its features.
  //
  // T: dtype. EACH: features a lane, C / threads rounded up.
  // x, g (N, C), g the gradient of y; w (C,); sizes: N, C, groups; numbers: eps
  // dx (N, C); parts float32 (groups, C)
  threadgroup float shared[32];
  const int rows = sizes[0];
  const int features = sizes[1];
  const int group = int(threadgroup_position_in_grid.x);
  const int groups = sizes[2];
  const int lane = int(thread_index_in_threadgroup);
  const int step = int(threads_per_threadgroup.x);
  const Lanes at = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, uint(step) / 32};

  float sums[EACH];
  float scales[EACH];  // w
  for (int e = 0; e < EACH; e++) {
    const int c = lane + e * step;
    sums[e] = 0.0f;
    scales[e] = c < features ? float(w[c]) : 0.0f;
  }
  for (int row = group; row < rows; row += groups) {
    const size_t base = size_t(row) * size_t(features);
    float xs[EACH];
    float gs[EACH];
    float squares = 0.0f;
    float product = 0.0f;
    for (int e = 0; e < EACH; e++) {
      const int c = lane + e * step;
      xs[e] = c < features ? float(x[base + c]) : 0.0f;
      gs[e] = c < features ? float(g[base + c]) : 0.0f;
      squares += xs[e] * xs[e];
      product += xs[e] * gs[e] * scales[e];
    }
    squares = sum_of_all(squares, at, shared);
    product = sum_of_all(product, at, shared);
    const float r = 1.0f / sqrt(squares / float(features) + numbers[0]);
    const float along = product * r * r / float(features);
    for (int e = 0; e < EACH; e++) {
      const int c = lane + e * step;
      if (c < features) dx[base + c] = T(r * (gs[e] * scales[e] - xs[e] * along));
      sums[e] += gs[e] * xs[e] * r;
    }
  }
  for (int e = 0; e < EACH; e++) {
    const int c = lane + e * step;
    if (c < features) parts[size_t(group) * size_t(features) + c] = sums[e];
  }
