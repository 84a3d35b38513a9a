// Runs a grid, threadgroup after threadgroup. The generated file defines call_kernel before it.
#pragma once
#include "ubsan.h"

namespace emu {

struct Buffer {  // as Python's Buffer
  const char* name;
  char* begin;
  size_t bytes, element;
  int writable;
  size_t filled;          // out: elements written
  size_t first_unwritten;  // out
};

static Cell* cells_for(size_t count) {  // zero, and allocated only where touched
  void* p = mmap(nullptr, count * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : (Cell*)p;
}

static uint3 place(uint i, const uint* size) { return uint3(i % size[0], i / size[0] % size[1], i / (size[0] * size[1])); }

}  // namespace emu

static std::vector<emu::Region> regions;
static uint grid[3], group[3], groups[3];
static void call_kernel(uint3 at, uint index);

// Returns 0, or 1 with a message. `chosen`: the threadgroups to run, or null for all of them.
extern "C" int launch(emu::Buffer* buffers, int count, const uint* grid_, const uint* group_, const uint* chosen,
                      uint chosen_count, int order, uint seed, char* message) {
  using namespace emu;
  message_out = message;
  emu::order = Order(order);
  random_state = seed | 1;
  failed = false;
  current = nullptr;
  uint total = 1;
  for (int i = 0; i < 3; i++) {
    grid[i] = grid_[i];
    group[i] = std::min(group_[i], grid_[i]);
    groups[i] = (grid[i] + group[i] - 1) / group[i];
    total *= groups[i];
  }
  regions.clear();
  for (int i = 0; i < count; i++) {
    Buffer& b = buffers[i];
    Cell* cells = b.writable ? cells_for(b.bytes / b.element) : nullptr;
    if (b.writable && !cells) { say("no address space to watch " + std::string(b.name)); return 1; }
    regions.push_back({b.name, b.begin, b.bytes, b.element, cells, false});
  }
  std::vector<uint> turn;
  for (uint i = 0; i < (chosen ? chosen_count : total); i++) turn.push_back(chosen ? chosen[i] : i);
  if (order == BACKWARD) std::reverse(turn.begin(), turn.end());
  if (order == SHUFFLED)
    for (size_t i = turn.size(); i-- > 1;) std::swap(turn[i], turn[random_number() % (i + 1)]);
  run_lane = [](uint index) { call_kernel(place(index, &threads.x), index); };
  bool good = true;
  for (size_t i = 0; i < turn.size() && good; i++) {
    group_index = turn[i];
    threadgroup_at = place(turn[i], groups);
    threads = uint3(std::min(group[0], grid[0] - threadgroup_at.x * group[0]),
                    std::min(group[1], grid[1] - threadgroup_at.y * group[1]),
                    std::min(group[2], grid[2] - threadgroup_at.z * group[2]));
    good = run_threadgroup(threads.x * threads.y * threads.z);
  }
  for (int i = 0; i < count; i++) {
    Region& r = regions[i];
    if (!r.cells) continue;
    size_t elements = r.bytes / r.element, j = 0;
    buffers[i].filled = r.filled;
    if (good && !chosen && r.filled < elements)
      while (r.cells[j].written) j++;
    buffers[i].first_unwritten = j;
    munmap(r.cells, elements * sizeof(Cell));
  }
  return !good;
}
