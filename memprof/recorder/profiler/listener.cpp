// Receives what torch's allocators report to a profiler, without torch's profiler.
//
// Built by `memprof doctor --build` against the installed torch (listener_build.py) and called through ctypes
// (listener.py). The reports go to the object in one slot of the thread's local state, which torch passes on to the
// threads of backward. Torch takes whatever is there for a profiler of its own, so the listener is one: disabled, so
// that torch says none runs, and with memory events on.

#include <pthread.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <atomic>
#include <ctime>
#include <memory>
#include <mutex>
#include <vector>

namespace {

using namespace torch::profiler::impl;
using Local = c10::ThreadLocalDebugInfo;

// The CPU's highest count since Python last reset it; a reset that meets a report may lose that report.
std::atomic<int64_t> high{0};

struct Listener final : ProfilerStateBase {
  explicit Listener(bool keeps_rows)
      : ProfilerStateBase(ProfilerConfig(ProfilerState::Disabled)), keeps_rows(keeps_rows) {
    if (keeps_rows)
      cpu.reserve(1 << 14);
  }

  bool memoryProfilingEnabled() const override {
    return is_on.load(std::memory_order_relaxed);
  }

  ActiveProfilerType profilerType() override {
    return ActiveProfilerType::NONE;
  }

  // Called by the allocator, from several threads where backward has some; nothing may be thrown here.
  void reportMemoryUsage(void* address, int64_t size, size_t total, size_t, c10::Device device) noexcept override {
    if (!is_on.load(std::memory_order_relaxed))
      return;
    if (!keeps_rows) {
      // Before a free, too: other threads may have allocated since the last report here.
      const int64_t most = static_cast<int64_t>(total) + (size < 0 ? -size : 0);
      if (device.is_cpu() && most > high.load(std::memory_order_relaxed))
        high.store(most, std::memory_order_relaxed);
      return;
    }
    std::lock_guard<std::mutex> guard(lock);
    if (!is_on.load(std::memory_order_relaxed)) // ended meanwhile: its rows are being read
      return;
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const int64_t time_ns = now.tv_sec * 1000000000LL + now.tv_nsec;
    try {
      if (device.is_cpu())
        cpu.insert(cpu.end(), {time_ns, reinterpret_cast<int64_t>(address), size, static_cast<int64_t>(total)});
      else if (device.is_cuda())
        cuda.insert(cuda.end(), {time_ns, device.index(), size});
    } catch (...) { // no memory for another row: what follows would be a gap
      is_on = false;
      is_full = true;
    }
  }

  const bool keeps_rows; // or else the highest count alone
  std::atomic<bool> is_on{true};
  bool is_full = false; // not all rows are there
  std::mutex lock;
  std::vector<int64_t> cpu; // time in Unix ns, address, bytes (negative for a free), and the allocator's count
  std::vector<int64_t> cuda; // time in Unix ns, device, bytes
};

// One at a time: the last one started, whose rows stay until the next start. Never destroyed: threads outlive main.
auto& last = *new std::shared_ptr<Listener>;

// A child has none of its parent's threads, one of which may have held the lock.
const int at_fork = pthread_atfork(nullptr, nullptr, [] {
  if (last)
    last->is_on = false;
  last.reset();
});

bool is_in_slot(const Listener* listener) {
  return listener && Local::get(c10::DebugInfoKind::PROFILER_STATE) == listener;
}

} // namespace

extern "C" {

// Removes ended listeners from this thread: backward restores what was there when it began. With `evicts`, also one that
// is on, whose rows then lack what this thread does. Returns whether none is left; inside a scope of torch's own, which
// is above it, one may be.
int memprof_clear(int evicts) noexcept {
  try {
    for (;;) {
      auto* found = dynamic_cast<Listener*>(Local::get(c10::DebugInfoKind::PROFILER_STATE));
      if (!found || (found->is_on && !evicts))
        return 1;
      if (found->is_on) {
        std::lock_guard<std::mutex> guard(found->lock);
        found->is_full = true;
      }
      Local::_pop(c10::DebugInfoKind::PROFILER_STATE); // throws if something else is above it
    }
  } catch (...) {
    return 0;
  }
}

// Starts in this thread; returns 0 if a profiler has the slot.
int memprof_start(int keeps_rows) noexcept {
  try {
    if (last)
      last->is_on = false;
    if (!memprof_clear(0) || Local::get(c10::DebugInfoKind::PROFILER_STATE))
      return 0;
    auto made = std::make_shared<Listener>(keeps_rows != 0);
    Local::_push(c10::DebugInfoKind::PROFILER_STATE, made);
    last = std::move(made);
    high = 0;
    return 1;
  } catch (...) { // no memory
    return 0;
  }
}

// Ends in all threads; returns whether all rows since the start are there.
int memprof_stop() noexcept {
  if (!last)
    return 0;
  std::lock_guard<std::mutex> guard(last->lock);
  last->is_on = false;
  return is_in_slot(last.get()) && !last->is_full;
}

// Returns where the highest count is.
void* memprof_high() noexcept {
  return &high;
}

// Returns the number of words of the rows, and where they are: the CPU's, or those of CUDA devices.
int64_t memprof_rows(int is_cuda, const int64_t** place) noexcept {
  if (!last)
    return 0;
  const auto& rows = is_cuda ? last->cuda : last->cpu;
  *place = rows.data();
  return static_cast<int64_t>(rows.size());
}
}
