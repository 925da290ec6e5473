// Streams as queues of work that runs late and in a random order. Nothing that CUDA does asynchronously happens when it
// is called: it is queued. Where the host waits, work runs, as much as it takes until what is waited for is done; which
// stream goes on is drawn by the seed, as far as events allow. So a wait that is missing, or a buffer that is used again
// too early, gives another result in some order.
//
// Streams have priorities that are drawn afresh whenever the host waits, and now and then between: a stream that runs
// far ahead of another shows more than taking turns does.
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
    bool is_polled = false;  // the host has found it not done
    std::chrono::steady_clock::time_point time;
    Clock clock;
};

// True when it is done; false where it waits for another process and is to be called again.
using Task = std::function<bool()>;

struct Work {
    std::uint64_t order;  // of issue, in all streams
    std::string what;
    Task run;                                 // null: nothing to do but to wait
    std::shared_ptr<const Record> waits_for;  // null: for nothing
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
    simt::runtime::Clock clock = {};  // what is ordered before its next piece of work
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

    // Null is the null stream of the device. A destroyed stream or event ends the process.
    CUstream_st& get(cudaStream_t stream);
    CUevent_st& get_event(cudaEvent_t event);

    void add(cudaStream_t handle, const std::string& what, Task run, std::span<const Access> accesses = {});
    void record(cudaEvent_t event, cudaStream_t stream);
    // Changes what events measure: as though work that runs now took so much longer, or shorter.
    void add_time(std::chrono::nanoseconds time) { added_ += time; }
    void wait(cudaStream_t handle, cudaEvent_t event);

    // The host waits; `call` names what it waits in.
    void synchronize(cudaStream_t handle, const char* call);
    void synchronize_event(cudaEvent_t event, const char* call);
    void synchronize_all(const char* call);
    // Runs one piece of work. False where none can run now.
    bool step();
    // Runs a little, then says whether all is done.
    bool query(cudaStream_t handle);
    bool query_event(cudaEvent_t event);

    // Releases memory: what is known of its use is forgotten. Ends the process where work still uses it.
    void forget(const void* begin, std::size_t bytes, const char* call);
    // After a fault nothing runs any more.
    void discard();

    // From now on work also runs while the host is elsewhere, as on a GPU: another process may wait for it.
    void run_in_background();
    void stop_background();
    void host_is_here();
    bool runs_on_this_thread() const { return running_on_ == std::this_thread::get_id(); }

    // What is left in queues of streams that were not destroyed; empty where nothing is.
    std::string unfinished() const;

  private:
    bool is_null(const CUstream_st& stream) const { return stream.number == 0; }
    bool run_next(CUstream_st& stream);
    void draw_priorities();
    void ask_for(const void* awaited);
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
    bool waits_for_peers_ = false;     // some work did, in the last step
    // Never freed, so that a destroyed one is known. The first is the null stream.
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
