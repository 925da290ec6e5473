// Streams as queues of work that runs late and in a random order. Asynchronous work of CUDA does not run when
// it is called, but is queued. When the host waits, work runs until the awaited work is done. The seed draws
// which stream goes on, as far as events allow. So a missing wait, or a buffer that is reused too early,
// changes the result in some order.
//
// Streams have random priorities. They are drawn again whenever the host waits, and sometimes in between. A
// stream that runs far ahead of another shows more faults than alternating streams.
//
// The null stream waits for all streams but those made with cudaStreamNonBlocking, and its work runs at once.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "simt/runtime/accesses.h"

namespace simt::runtime {

// One cudaEventRecord.
struct Record {
    bool done = false;
    bool is_polled = false;  // the host has polled it before it was done
    unsigned stream = 0;     // its number
    std::chrono::steady_clock::time_point time;
    Clock clock;
};

// Returns true when it is done, and false if it waits for another process, or for other work. It is then called
// again.
using Task = std::function<bool()>;
// What a task waits for: "rank 1"
using Reason = std::function<std::string()>;

struct Work {
    std::uint64_t order;  // in which it was issued, among all streams
    std::string what;
    Task run;                                 // null: it only waits
    std::shared_ptr<const Record> waits_for;  // null: it waits for nothing
    Reason why = {};                          // null: its task never waits
};

}  // namespace simt::runtime

struct CUstream_st {
    unsigned number;  // 0: the null stream
    int device;
    bool blocking;
    int priority = 0;
    bool destroyed = false;
    std::deque<simt::runtime::Work> queue = {};
    std::uint64_t issued = 0;
    simt::runtime::Clock clock = {};  // everything that is ordered before its next piece of work
};

struct CUevent_st {
    unsigned flags;
    bool destroyed = false;
    std::shared_ptr<simt::runtime::Record> latest = nullptr;  // null: never recorded
};

namespace simt::runtime {

class Streams {
  public:
    explicit Streams(std::uint64_t seed);
    ~Streams();
    Streams(const Streams&) = delete;
    Streams& operator=(const Streams&) = delete;

    cudaStream_t create(int device, bool blocking, int priority);
    void destroy(cudaStream_t stream);
    cudaEvent_t create_event(unsigned flags);
    void destroy_event(cudaEvent_t event);

    // Null means the device's null stream. Use of a destroyed stream or event ends the process.
    CUstream_st& get(cudaStream_t stream);
    CUevent_st& get_event(cudaEvent_t event);

    void add(cudaStream_t handle, const std::string& what, Task run, std::span<const Access> accesses = {},
             Reason why = {});
    void record(cudaEvent_t event, cudaStream_t stream);
    // Changes the times that events measure, as if the work that runs now took this much longer, or shorter.
    void add_time(std::chrono::nanoseconds time) { added_ += time; }
    void wait(cudaStream_t handle, cudaEvent_t event);

    // The host waits; `call` names the call in which it waits.
    void synchronize(cudaStream_t handle, const char* call);
    void synchronize_event(cudaEvent_t event, const char* call);
    void synchronize_all(const char* call);
    // Waits for all issued work, as a first launch may. Unlike a wait of the host, this orders no accesses: work that
    // follows is ordered by chance.
    void wait_for_all_by_chance(const char* call);
    // Runs one piece of work. Returns false if none can run now.
    bool step();
    // Runs a little work, then returns whether all is done.
    bool query(cudaStream_t handle);
    bool query_event(cudaEvent_t event);

    // Forgets the accesses to memory that the caller then releases. Ends the process if unfinished work uses
    // it.
    void forget(const void* begin, std::size_t bytes, const char* call);
    // Discards all work: after a fault no work runs.
    void discard();

    // From now on work also runs while the host is elsewhere, as on a GPU, because another process may wait
    // for it.
    void run_in_background();
    void stop_background();
    void host_is_here();
    bool runs_on_this_thread() const { return running_on_ == std::this_thread::get_id(); }

    // What each stream is at, and waits for: " stream 1 is at scale_kernel; ..."
    std::string standing() const;
    // Describes queued work of streams that were not destroyed; empty if there is none.
    std::string unfinished() const;

  private:
    bool is_null(const CUstream_st& stream) const { return stream.number == 0; }
    bool run_next(CUstream_st& stream);
    void draw_priorities();
    void ask_for(const void* awaited);
    bool is_empty() const;
    void run_until(const std::function<bool()>& done, const char* call);
    void wait_for_blocking_streams(const char* call);
    std::uint64_t done(const CUstream_st& stream) const { return stream.issued - stream.queue.size(); }
    Clock all_done() const;
    void host_waited_for(const Clock& clock);
    [[noreturn]] void report_standstill(const char* call) const;

    std::mt19937_64 random_;
    const bool shuffled_;
    std::uint64_t next_order_ = 0;
    std::chrono::nanoseconds added_{0};
    const void* asked_for_ = nullptr;  // by the last query: a stream or a record
    bool waits_for_peers_ = false;     // some work waited in the last step
    // Never freed, so that the use of a destroyed one is detected. The first is the null stream.
    std::deque<CUstream_st> streams_;
    std::deque<CUevent_st> events_;
    std::vector<CUstream_st*> by_priority_;
    Accesses accesses_;
    std::atomic<std::thread::id> running_on_{};
    std::atomic<std::chrono::steady_clock::time_point> host_was_here_{};
    std::atomic<bool> background_ends_ = false;
    std::thread background_;
};

}  // namespace simt::runtime
