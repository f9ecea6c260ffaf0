// Threads for the kernels of a step.
//
// Unlike those of OpenMP, they need not all take part: whoever is running takes the next piece of work, and a thread
// that the system has put aside for another process holds up nobody. A step has dozens of parallel sections, so with
// OpenMP two busy processes on the same cores wait for each other's time slices in every one of them.

#pragma once

#include <immintrin.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

namespace corolla {

class Pool {
 public:
  // The one pool of this process; its threads end with it.
  static Pool& instance() {
    static Pool* pool = new Pool;
    return *pool;
  }

  // Calls function(i) for every i below `count`, on up to `threads` threads, this one among them. While another
  // thread of the process uses the pool, this one works alone.
  template <typename Function>
  void run(int threads, int64_t count, const Function& function) {
    std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    if (threads < 2 || count < 2 || !lock.owns_lock()) {
      for (int64_t i = 0; i < count; ++i) function(i);
      return;
    }
    for (; workers_ < threads - 1; ++workers_) std::thread([this] { work(); }).detach();
    call_ = [](const void* f, int64_t i) { (*static_cast<const Function*>(f))(i); };
    function_ = &function;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    gate_.fetch_and(~CLOSED, std::memory_order_release);
    job_.fetch_add(1, std::memory_order_release);
    job_.notify_all();
    take_pieces();
    gate_.fetch_or(CLOSED, std::memory_order_acq_rel);
    while (gate_.load(std::memory_order_acquire) != CLOSED) _mm_pause();
  }

 private:
  static constexpr uint32_t CLOSED = 1u << 31;
  static constexpr int SPINS = 8000;  // some 200 microseconds: longer than the way from one kernel to the next

  void take_pieces() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) call_(function_, i);
  }

  void work() {
    uint32_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < SPINS && job_.load(std::memory_order_acquire) == seen; ++spin) _mm_pause();
      job_.wait(seen, std::memory_order_acquire);
      seen = job_.load(std::memory_order_acquire);
      if (!(gate_.fetch_add(1, std::memory_order_acq_rel) & CLOSED)) take_pieces();
      gate_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex busy_;
  int workers_ = 0;
  void (*call_)(const void*, int64_t) = nullptr;
  const void* function_ = nullptr;
  int64_t count_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<uint32_t> job_{0};
  std::atomic<uint32_t> gate_{CLOSED};  // how many workers are inside; none may enter while it is closed
};

}  // namespace corolla
