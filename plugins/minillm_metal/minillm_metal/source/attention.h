// Below all values compared here; finite, so that fast math cannot drop it.
constant constexpr float LOWEST = -3.0e38f;

// Shapes of attention: q (B, T, H, D), k and v (B, S, K, D); sizes: T, S, H, K.
struct Shapes {
  int queries, keys, heads, kv_heads, window;
};

inline Shapes shapes_of(constant const int* sizes, int window) {
  return {sizes[0], sizes[1], sizes[2], sizes[3], window};
}

// Query t has position t + S - T, and sees the last `window` keys up to itself, of its own document.
inline bool sees(int query, int key, int query_document, int key_document, Shapes of) {
  const int behind = query + of.keys - of.queries - key;
  return query < of.queries && key < of.keys && behind >= 0 && behind < of.window &&
         query_document == key_document;
}

// Copies rows first .. first + ROWS - 1 of a head, `stride` apart, zeros for those that are not there.
template <typename T, int ROWS, int D, int COLUMNS>
inline void stage(threadgroup T* to, device const T* from, int first, int rows, size_t stride, uint lane, uint lanes) {
  for (uint i = lane; i < uint(ROWS * D); i += lanes) {
    const int row = first + int(i) / D;
    const uint column = i % uint(D);
    T x = T(0.0f);
    if (row < rows) x = from[size_t(row) * stride + column];
    to[(i / uint(D)) * COLUMNS + column] = x;
  }
}
