#include "simt/runtime/streams.h"

#include <algorithm>
#include <utility>

#include "simt/runtime/runtime.h"

namespace simt::runtime {
namespace {

using std::chrono::steady_clock;
using namespace std::chrono_literals;

// Priorities are drawn again after this many pieces of work.
constexpr unsigned steps_of_a_priority = 64;
// If the host makes no call for this long, work runs without it.
constexpr auto host_is_away = 20ms;

std::string name(const CUstream_st& stream) {
    return stream.number == 0 ? "the null stream" : "stream " + std::to_string(stream.number);
}

}  // namespace

Streams::Streams(std::uint64_t seed) : random_(seed), shuffled_(seed != 0) {
    create(0, true, 0);  // the null stream
}

Streams::~Streams() { stop_background(); }

cudaStream_t Streams::create(int device, bool blocking, int priority) {
    const auto number = static_cast<unsigned>(streams_.size());
    streams_.push_back({.number = number, .device = device, .blocking = blocking, .priority = priority});
    by_priority_.push_back(&streams_.back());
    return &streams_.back();
}

void Streams::destroy(cudaStream_t stream) { get(stream).destroyed = true; }  // queued work still runs

cudaEvent_t Streams::create_event(unsigned flags) {
    events_.push_back({.flags = flags});
    return &events_.back();
}

void Streams::destroy_event(cudaEvent_t event) { get_event(event).destroyed = true; }

CUstream_st& Streams::get(cudaStream_t stream) {
    if (stream == nullptr || stream == cudaStreamLegacy) return streams_.front();
    for (CUstream_st& s : streams_) {
        if (&s != stream) continue;
        if (s.destroyed) stop(name(s) + " was destroyed and is used");
        return s;
    }
    stop("a cudaStream_t that no stream has");
}

CUevent_st& Streams::get_event(cudaEvent_t event) {
    for (CUevent_st& e : events_) {
        if (&e != event) continue;
        if (e.destroyed) stop("an event was destroyed and is used");
        return e;
    }
    stop("a cudaEvent_t that no event has");
}

// ---- queued work ----

void Streams::add(cudaStream_t handle, const std::string& what, Task run, std::span<const Access> accesses,
                  Reason why) {
    CUstream_st& stream = get(handle);
    if (!is_null(stream) && stream.device != current_device()) {
        stop(what + " in " + name(stream) + ", which is of device " + std::to_string(stream.device) +
             ", while device " + std::to_string(current_device()) + " is set");
    }
    if (is_null(stream)) wait_for_blocking_streams(what.c_str());
    ++stream.issued;
    join(stream.clock, [&] {
        Clock own(stream.number + 1);
        own.back() = stream.issued;
        return own;
    }());
    for (const Access& access : accesses) {
        accesses_.add(access, what, stream.number, stream.issued, stream.clock);
    }
    stream.queue.push_back({next_order_++, what, std::move(run), nullptr, std::move(why)});
    if (is_null(stream)) synchronize(handle, what.c_str());
}

void Streams::record(cudaEvent_t event, cudaStream_t stream) {
    const auto record = std::make_shared<Record>();
    get_event(event).latest = record;
    // The record is work of the stream, so the stream's order applies to it.
    add(stream, "cudaEventRecord", [this, record] {
        record->time = steady_clock::now() + added_;
        return record->done = true;
    });
    record->clock = get(stream).clock;
    record->stream = get(stream).number;
}

void Streams::wait(cudaStream_t handle, cudaEvent_t event) {
    const auto record = get_event(event).latest;
    CUstream_st& stream = get(handle);
    if (!record) return;
    if (is_null(stream)) {
        synchronize_event(event, "cudaStreamWaitEvent");
        return;
    }
    ++stream.issued;
    join(stream.clock, record->clock);
    stream.queue.push_back({next_order_++, "cudaStreamWaitEvent", nullptr, record});
}

// ---- running work ----

void Streams::draw_priorities() {
    if (shuffled_) std::shuffle(by_priority_.begin(), by_priority_.end(), random_);
}

bool Streams::step() {
    if (shuffled_) {
        if (random_() % steps_of_a_priority == 0) draw_priorities();
    } else {
        std::ranges::sort(by_priority_, {}, [](const CUstream_st* s) {
            return s->queue.empty() ? UINT64_MAX : s->queue.front().order;
        });
    }
    waits_for_peers_ = false;
    for (CUstream_st* stream : by_priority_) {
        if (stream->queue.empty()) continue;
        const auto& record = stream->queue.front().waits_for;
        if (record && !record->done) continue;
        if (run_next(*stream)) return true;
        waits_for_peers_ = true;
    }
    return false;
}

bool Streams::run_next(CUstream_st& stream) {
    Work& work = stream.queue.front();
    if (work.run) {
        Memory& memory = runtime().memory;
        memory.begin_work();
        running_on_ = std::this_thread::get_id();
        const bool done = work.run();
        running_on_ = std::thread::id{};
        memory.end_work();
        if (runtime().fault() != cudaSuccess) {
            discard();
            return true;
        }
        if (!done) return false;
    }
    stream.queue.pop_front();
    return true;
}

void Streams::run_until(const std::function<bool()>& done, const char* call) {
    draw_priorities();
    while (runtime().fault() == cudaSuccess && !done()) {
        if (step()) continue;
        if (!waits_for_peers_) report_standstill(call);
        // Lets other threads call now, for example one that aborts a collective.
        runtime().memory.close();
        runtime().mutex.unlock();
        std::this_thread::sleep_for(20us);
        runtime().mutex.lock();
    }
    runtime().memory.close();
}

void Streams::report_standstill(const char* call) const {
    stop(std::string(call) + ": no stream can go on:" + standing());
}

std::string Streams::standing() const {
    std::string text;
    for (const CUstream_st& stream : streams_) {
        if (stream.queue.empty()) continue;
        const Work& work = stream.queue.front();
        std::string why = work.why ? work.why() : "";
        if (work.waits_for && !work.waits_for->done)
            why = "an event of stream " + std::to_string(work.waits_for->stream);
        text += " " + name(stream) + " is at " + work.what + (why.empty() ? "" : ", which waits for " + why) +
                ";";
    }
    return text;
}

void Streams::discard() {
    for (CUstream_st& stream : streams_) stream.queue.clear();
}

// ---- waits of the host ----

// All work that is issued from now on is ordered after this moment.
void Streams::host_waited_for(const Clock& clock) { accesses_.forget_before(clock); }

void Streams::synchronize(cudaStream_t handle, const char* call) {
    CUstream_st& stream = get(handle);
    if (is_null(stream) && stream.queue.empty()) wait_for_blocking_streams(call);
    const Clock clock = stream.clock;
    const std::uint64_t issued = stream.issued;
    runtime().counts.waits(call);
    run_until([&] { return done(stream) >= issued; }, call);
    host_waited_for(clock);
}

void Streams::synchronize_event(cudaEvent_t event, const char* call) {
    const auto record = get_event(event).latest;
    if (!record) return;
    runtime().counts.waits(call);
    run_until([&] { return record->done; }, call);
    host_waited_for(record->clock);
}

bool Streams::is_empty() const {
    return std::ranges::all_of(streams_, [](const auto& s) { return s.queue.empty(); });
}

void Streams::wait_for_all_by_chance(const char* call) {
    run_until([&] { return is_empty(); }, call);
}

void Streams::synchronize_all(const char* call) {
    runtime().counts.waits(call);
    run_until([&] { return is_empty(); }, call);
    for (const CUstream_st& stream : streams_) host_waited_for(stream.clock);
}

void Streams::wait_for_blocking_streams(const char* call) {
    const auto is_done = [](const CUstream_st& s) { return !s.blocking || s.queue.empty(); };
    runtime().counts.waits(call);
    run_until([&] { return std::ranges::all_of(streams_, is_done); }, call);
    for (const CUstream_st& stream : streams_) {
        if (stream.blocking) host_waited_for(stream.clock);
    }
}

// Repeated queries for the same object count as one wait.
void Streams::ask_for(const void* awaited) {
    if (asked_for_ != awaited) draw_priorities();
    asked_for_ = awaited;
}

bool Streams::query(cudaStream_t handle) {
    const CUstream_st& stream = get(handle);
    ask_for(&stream);
    const auto waits_for = [&](const CUstream_st& s) { return is_null(stream) ? s.blocking : &s == &stream; };
    const auto is_done = [&](const CUstream_st& s) { return s.queue.empty() || !waits_for(s); };
    if (!std::ranges::all_of(streams_, is_done)) {
        runtime().counts.waits("cudaStreamQuery");
        step();
        runtime().memory.close();
    }
    if (!std::ranges::all_of(streams_, is_done)) return false;
    for (const CUstream_st& s : streams_) {
        if (waits_for(s)) host_waited_for(s.clock);
    }
    return true;
}

bool Streams::query_event(cudaEvent_t event) {
    const auto record = get_event(event).latest;
    if (!record) return true;
    ask_for(record.get());
    if (!record->done) {
        if (!std::exchange(record->is_polled, true)) runtime().counts.waits("cudaEventQuery");
        step();
        runtime().memory.close();
    }
    if (!record->done) return false;
    host_waited_for(record->clock);
    return true;
}

Clock Streams::all_done() const {
    Clock clock;
    for (const CUstream_st& stream : streams_) clock.push_back(done(stream));
    return clock;
}

void Streams::forget(const void* begin, std::size_t bytes, const char* call) {
    if (const std::string* what = accesses_.unfinished(begin, bytes, all_done())) {
        stop(std::string(call) + " of memory that " + *what + " has yet to use");
    }
    accesses_.forget(begin, bytes);
}

std::string Streams::unfinished() const {
    for (const CUstream_st& stream : streams_) {
        if (stream.destroyed || stream.queue.empty()) continue;
        return name(stream) + " has " + std::to_string(stream.queue.size()) +
               " pieces of work that the program never waited for, the first one " +
               stream.queue.front().what;
    }
    return "";
}

// ---- work without the host ----

void Streams::host_is_here() { host_was_here_ = steady_clock::now(); }

void Streams::run_in_background() {
    if (background_.joinable()) return;
    const auto is_away = [this] { return steady_clock::now() - host_was_here_.load() > host_is_away; };
    const auto go_on = [this, is_away] {
        const std::lock_guard one_at_a_time(runtime().mutex);
        const bool goes_on = is_away() && runtime().fault() == cudaSuccess && step();
        runtime().memory.close();
        return goes_on;
    };
    background_ = std::thread([this, is_away, go_on] {
        while (!background_ends_) {
            std::this_thread::sleep_for(1ms);
            while (!background_ends_ && is_away() && go_on()) {
            }
        }
    });
}

void Streams::stop_background() {
    background_ends_ = true;
    if (background_.joinable()) background_.join();
}

}  // namespace simt::runtime
