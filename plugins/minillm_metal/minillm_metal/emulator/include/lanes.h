// Lanes as fibers: each runs until it waits, and the scheduler resumes all of them together.
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <algorithm>
#include <string>
#include <vector>
#include "memory.h"

namespace emu {

enum State { RUNS, AT_BARRIER, AT_SIMD, RETURNED };

struct Lane {
  uint index = 0;  // in the threadgroup
  State state = RUNS;
  bool started = false;
  int line = 0;             // where it waits
  const char* waits = "";   // for what
  uint exchanges = 0;       // simdgroup operations so far
  uint barriers[2] = {0, 0}, simd_barriers[2] = {0, 0};  // of device memory, of threadgroup memory
  ucontext_t context;
  jmp_buf resume;
};

// Values exchanged by the lanes of a simdgroup; two sets, since a lane may be one ahead.
struct Exchange {
  alignas(16) char value[2][32][64];
  uint active[2];
};

enum Order { FORWARD, BACKWARD, SHUFFLED };
constexpr size_t STACK = 256 * 1024, THREADGROUP_MEMORY = 32 * 1024;

static std::vector<Region*> arrays;  // in threadgroup memory
static std::vector<Lane> lanes;
static std::vector<Exchange> exchanges;
static Lane* current = nullptr;
static uint32_t group_index = 0;
static size_t threadgroup_bytes = 0;
static Order order = FORWARD;
static uint32_t random_state = 1;
static char* message_out = nullptr;
static bool failed = false;
static jmp_buf scheduler;
static void (*run_lane)(uint index) = nullptr;
static uint3 threads, threadgroup_at;

static uint32_t random_number() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  random_state ^= random_state << 5;
  return random_state;
}

static void say(const std::string& message) { snprintf(message_out, 1024, "%s", message.c_str()); }

void fail(const std::string& message, int line) {
  std::string where = line ? " (line " + std::to_string(line) + ")" : "";
  std::string who = current ? ", lane " + std::to_string(current->index) + " of threadgroup " + std::to_string(group_index) : "";
  say(message + where + who);
  failed = true;
  _longjmp(scheduler, 1);
}

Access now(bool threadgroup_memory) {
  return {group_index, current->barriers[threadgroup_memory], current->simd_barriers[threadgroup_memory],
          uint16_t(current->index)};
}

void declare(Region* region) {
  arrays.push_back(region);
  threadgroup_bytes += region->bytes;
  memset(region->begin, 0xff, region->bytes);
  memset((void*)region->cells, 0, region->bytes / region->element * sizeof(Cell));
  if (threadgroup_bytes > THREADGROUP_MEMORY)
    fail("threadgroup memory of " + std::to_string(threadgroup_bytes) + " bytes, more than 32 KiB", 0);
}

inline void wait_for(State state, const char* what, int line) {
  current->state = state;
  current->waits = what;
  current->line = line;
  if (!_setjmp(current->resume)) _longjmp(scheduler, 1);
}

inline uint lane_in_simdgroup() { return current->index % 32; }

// Passes `value` to the simdgroup; returns its lanes' first value, and the participating lanes.
template <class T> const char* exchange(T value, const char* what, int line, uint& active) {
  static_assert(sizeof(T) <= 64, "fits a slot");
  Lane* lane = current;
  uint set = lane->exchanges++ & 1;
  memcpy(exchanges[lane->index / 32].value[set][lane->index % 32], &value, sizeof value);
  wait_for(AT_SIMD, what, line);
  active = exchanges[lane->index / 32].active[set];
  return exchanges[lane->index / 32].value[set][0];
}
template <class T> T taken(const char* values, uint lane) {
  T value;
  memcpy(&value, values + 64 * lane, sizeof value);
  return value;
}

static void lane_entry() {
  run_lane(current->index);
  current->state = RETURNED;
  _longjmp(scheduler, 1);
}

static void resume(Lane& lane, void* stack) {
  current = &lane;
  if (_setjmp(scheduler)) return;
  if (lane.started) _longjmp(lane.resume, 1);
  lane.started = true;
  getcontext(&lane.context);
  lane.context.uc_stack.ss_sp = stack;
  lane.context.uc_stack.ss_size = STACK;
  lane.context.uc_link = nullptr;
  makecontext(&lane.context, lane_entry, 0);
  setcontext(&lane.context);
}

static std::string whereabouts() {
  std::string all;
  for (size_t i = 0; i < lanes.size() && all.size() < 500; i++) {
    const Lane& l = lanes[i];
    if (i && l.state == lanes[i - 1].state && l.line == lanes[i - 1].line) continue;
    all += all.empty() ? "" : "; ";
    all += "lane " + std::to_string(i) + (l.state == RETURNED ? " has returned" : std::string(" waits at ") + l.waits + ", line " + std::to_string(l.line));
  }
  return all;
}

// Resumes the lanes that have all reached one barrier. False: none can continue, or a fault.
static bool release_threadgroup() {
  uint waiting = 0, returned = 0;
  int line = -1;
  bool same = true;
  for (Lane& l : lanes) {
    returned += l.state == RETURNED;
    if (l.state != AT_BARRIER) continue;
    waiting++;
    same &= line < 0 || l.line == line;
    line = l.line;
  }
  if (!waiting || waiting + returned != lanes.size()) return false;
  if (returned || !same) {
    say("divergent barrier: " + whereabouts());
    failed = true;
    return false;
  }
  for (Lane& l : lanes) l.state = RUNS;
  return true;
}

static bool release_simdgroups() {
  bool any = false;
  for (size_t g = 0; g < exchanges.size(); g++) {
    size_t begin = g * 32, end = std::min(lanes.size(), begin + 32);
    uint waiting = 0, returned = 0, active = 0, set = 0;
    const Lane* first = nullptr;
    bool same = true;
    for (size_t i = begin; i < end; i++) {
      Lane& l = lanes[i];
      returned += l.state == RETURNED;
      if (l.state != AT_SIMD) continue;
      waiting++;
      active |= 1u << (i - begin);
      set = (l.exchanges - 1) & 1;
      if (!first) first = &l;
      same &= l.line == first->line && l.waits == first->waits;
    }
    if (!waiting || waiting + returned != end - begin || !same) continue;
    exchanges[g].active[set] = active;
    for (size_t i = begin; i < end; i++)
      if (lanes[i].state == AT_SIMD) lanes[i].state = RUNS;
    any = true;
  }
  return any;
}

static bool run_threadgroup(uint count) {
  static std::vector<void*> stacks;
  while (stacks.size() < count)
    stacks.push_back(mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (Region* r : arrays) {
    memset(r->begin, 0xff, r->bytes);  // NaN
    memset((void*)r->cells, 0, r->bytes / r->element * sizeof(Cell));
  }
  lanes.assign(count, Lane());
  exchanges.assign((count + 31) / 32, Exchange());
  std::vector<uint> turn(count);
  for (uint i = 0; i < count; i++) lanes[i].index = turn[i] = i;
  if (order == BACKWARD) std::reverse(turn.begin(), turn.end());
  for (;;) {
    if (order == SHUFFLED)
      for (uint i = count - 1; i > 0; i--) std::swap(turn[i], turn[random_number() % (i + 1)]);
    bool all = true;
    for (uint i : turn) {
      if (lanes[i].state == RUNS) resume(lanes[i], stacks[i]);
      if (failed) return false;
      all &= lanes[i].state == RETURNED;
    }
    if (all) return true;
    if (!release_threadgroup() && !failed && !release_simdgroups()) {
      say("divergent simdgroup operation or barrier: " + whereabouts());
      failed = true;
    }
    if (failed) return false;
  }
}

}  // namespace emu
