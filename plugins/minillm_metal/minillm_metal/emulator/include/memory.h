// Pointers with address space, bounds and a record of accesses.
//
// The spaces are types: a pointer of one does not convert to another, nor to a plain pointer, so that
// code that Apple's compiler rejects does not compile here. Accesses go through Reference, which
// checks bounds and alignment and keeps, for every element that a kernel may write, the last write and
// the reads since: two unordered accesses, one of them a write, are a race in whatever order
// the lanes happen to run.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <string>
#include "types.h"

namespace emu {

[[noreturn]] void fail(const std::string& message, int line);

struct Device {};
struct Threadgroup {};
struct Constant {};

// An access: its lane, and the counts of threadgroup and simdgroup barriers before it.
struct Access {
  uint32_t group, barriers, simd_barriers;
  uint16_t lane;
};
Access now(bool threadgroup_memory);

struct Cell {
  Access write, read;  // the last ones
  bool written, is_read;
  bool by_lanes, by_simdgroups, by_groups;  // several have read since the last write
};

struct Region {
  const char* name;
  char* begin;
  size_t bytes, element;
  Cell* cells;  // one an element; null: read only
  bool in_threadgroup;
  size_t filled = 0;         // elements that were written
};

inline bool same_simdgroup(const Access& a, const Access& b) {
  return a.group == b.group && a.lane / 32 == b.lane / 32;
}

inline bool ordered(const Access& before, const Access& after) {
  if (before.group != after.group) return false;
  return before.lane == after.lane || before.barriers < after.barriers ||
         (same_simdgroup(before, after) && before.simd_barriers < after.simd_barriers);
}

inline std::string element_of(const Region& r, size_t i) {
  return std::string(r.name) + "[" + std::to_string(i) + "]";
}

[[noreturn]] inline void race(const Region& r, size_t i, const char* what, const Access& other, int line) {
  fail("race: " + std::string(what) + " of " + element_of(r, i) + " by lane " + std::to_string(other.lane) +
           " of threadgroup " + std::to_string(other.group) + ", with no barrier between",
       line);
}

inline void note_read(Region& r, size_t i, int line) {
  Cell& c = r.cells[i];
  if (!c.written) fail("reads " + element_of(r, i) + ", which was never written", line);
  Access a = now(r.in_threadgroup);
  if (c.written && !ordered(c.write, a)) race(r, i, "reads beside a write", c.write, line);
  if (!c.is_read || (c.read.group == a.group && c.read.barriers != a.barriers)) {
    c.by_lanes = c.by_simdgroups = false;
  } else if (c.read.group != a.group) {
    c.by_groups = true;
  } else {
    c.by_simdgroups |= !same_simdgroup(c.read, a);
    bool at_once = c.read.simd_barriers == a.simd_barriers;
    c.by_lanes = at_once && (c.by_lanes || c.read.lane != a.lane);
  }
  c.is_read = true;
  c.read = a;
}

inline void note_write(Region& r, size_t i, int line) {
  Cell& c = r.cells[i];
  Access a = now(r.in_threadgroup);
  if (c.written && !ordered(c.write, a)) race(r, i, "writes beside a write", c.write, line);
  if (c.is_read) {
    bool together = c.read.group == a.group && c.read.barriers == a.barriers;
    bool here = same_simdgroup(c.read, a);
    bool at_once = c.read.simd_barriers == a.simd_barriers && (c.by_lanes || c.read.lane != a.lane);
    if (c.by_groups || c.read.group != a.group || (together && (c.by_simdgroups || !here || at_once)))
      race(r, i, "writes beside a read", c.read, line);
  }
  r.filled += !c.written;
  c.written = true;
  c.is_read = c.by_lanes = c.by_simdgroups = c.by_groups = false;
  c.write = a;
}

// An index with the line where it was written: converted there, hence the default argument.
struct Index {
  int64_t i;
  int line;
  template <class I, class = std::enable_if_t<std::is_integral_v<I>>>
  Index(I value, int at = __builtin_LINE()) : i(int64_t(value)), line(at) {}
};

template <class Space, class T> struct Pointer;

template <class Space, class T> struct Reference {
  typedef std::remove_const_t<T> Value;
  T* at;
  Region* region;
  int line;

  size_t check() const {
    int64_t offset = (const char*)at - region->begin;
    if (offset < 0 || offset + int64_t(sizeof(T)) > int64_t(region->bytes))
      fail("out of bounds: byte " + std::to_string(offset) + " of " + region->name + ", which has " +
               std::to_string(region->bytes),
           line);
    if (offset % alignof(T)) fail("misaligned: byte " + std::to_string(offset) + " of " + region->name, line);
    return size_t(offset);
  }
  Value get() const {
    size_t offset = check();
    if (region->cells)
      for (size_t i = offset / region->element; i * region->element < offset + sizeof(T); i++)
        note_read(*region, i, line);
    return *at;
  }
  void set(Value value) const {
    static_assert(!std::is_const_v<T>, "writes to const memory");
    size_t offset = check();
    if (!region->cells) fail(std::string("writes ") + region->name + ", an input", line);
    for (size_t i = offset / region->element; i * region->element < offset + sizeof(T); i++)
      note_write(*region, i, line);
    *at = value;
  }
  operator Value() const { return get(); }
  template <class U, class V = Value,
            class = std::enable_if_t<std::is_same_v<V, bfloat> && std::is_same_v<U, float>>>
  operator U() const { return U(get()); }
  const Reference& operator=(Value v) const { set(v); return *this; }
  const Reference& operator=(const Reference& o) const { set(o.get()); return *this; }
  const Reference& operator+=(Value v) const { set(Value(get() + v)); return *this; }
  const Reference& operator-=(Value v) const { set(Value(get() - v)); return *this; }
  const Reference& operator*=(Value v) const { set(Value(get() * v)); return *this; }
  Pointer<Space, T> operator&() const { return Pointer<Space, T>(at, region); }
};

// The type of a value: that which a reference reads, and any other type unchanged.
template <class T> struct Value { typedef T type; };
template <class Space, class T> struct Value<Reference<Space, T>> { typedef std::remove_const_t<T> type; };
template <class T> using Plain = typename Value<T>::type;

template <class Space, class T> struct Pointer {
  T* at;
  Region* region;
  Pointer() : at(nullptr), region(nullptr) {}
  Pointer(T* p, Region* r) : at(p), region(r) {}
  template <class U, class = std::enable_if_t<std::is_same_v<const U, T>>>
  Pointer(const Pointer<Space, U>& o) : at(o.at), region(o.region) {}
  template <class U, class = std::enable_if_t<!std::is_same_v<const U, T> && !std::is_same_v<U, T>>, class = void>
  explicit Pointer(const Pointer<Space, U>& o) : at((T*)o.at), region(o.region) {}  // a cast
  Reference<Space, T> operator[](Index i) const { return {at + i.i, region, i.line}; }
  Reference<Space, T> operator*() const { return {at, region, 0}; }
  template <class I> Pointer operator+(I i) const { return Pointer(at + i, region); }
  template <class I> Pointer operator-(I i) const { return Pointer(at - i, region); }
  template <class I> Pointer& operator+=(I i) { at += i; return *this; }
  template <class I> Pointer& operator-=(I i) { at -= i; return *this; }
  Pointer& operator++() { ++at; return *this; }
};

void declare(Region* region);

// threadgroup T name[N]: one a threadgroup, forgotten before the next begins.
template <class T, int N> struct Array {
  alignas(16) T values[N];
  Cell cells[N];
  Region region;
  explicit Array(const char* name) : region{name, (char*)values, sizeof values, sizeof(T), cells, true} { declare(&region); }
  Reference<Threadgroup, T> operator[](Index i) { return {values + i.i, &region, i.line}; }
  operator Pointer<Threadgroup, T>() { return {values, &region}; }
  operator Pointer<Threadgroup, const T>() { return {values, &region}; }
  template <class I> Pointer<Threadgroup, T> operator+(I i) { return {values + i, &region}; }
};

// An argument of the kernel; converts to the type in its signature.
struct Argument {
  Region* region;
  template <class Space, class T> operator Pointer<Space, T>() const {
    static_assert(!std::is_same_v<Space, Threadgroup>, "an argument lies in device or constant memory");
    return Pointer<Space, T>((T*)region->begin, region);
  }
  template <class T> const T& number() const { return *(const T*)region->begin; }
};

}  // namespace emu
