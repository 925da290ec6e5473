#include "llmc/train/stop.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <utility>

#include "llmc/comm/launcher.h"
#include "llmc/core/error.h"

namespace llmc {

namespace {

// One request may arrive several times at once: a scheduler signals every process of a job, and mpirun passes
// the signal on.
constexpr std::int64_t same_request_ns = 100'000'000;

// The handler reads these, so they must be lock-free.
std::atomic<std::int64_t> first_signal_ns = 0;  // 0: none yet
std::atomic<bool> is_to_end = false;            // not SIGINT alone came
std::atomic<bool> installed = false;
std::atomic<const std::string*> on_first = nullptr, on_second = nullptr;
static_assert(std::atomic<std::int64_t>::is_always_lock_free &&
              std::atomic<const std::string*>::is_always_lock_free);

std::int64_t now_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec + 1;  // never 0
}

void write_now(const std::string* text) {
    // A failed write is ignored: the process is about to stop.
    if (text != nullptr && write(STDOUT_FILENO, text->data(), text->size()) < 0) return;
}

extern "C" void on_signal(int number) {
    const int interrupted_errno = errno;
    const std::int64_t now = now_ns();
    if (number != SIGINT) is_to_end = true;
    std::int64_t first = 0;
    if (first_signal_ns.compare_exchange_strong(first, now)) {
        write_now(on_first);
    } else if (now - first > same_request_ns) {
        write_now(on_second);
        std::signal(number, SIG_DFL);
        raise(number);  // delivered when this returns
    }
    errno = interrupted_errno;
}

constexpr std::array caught = {SIGINT, SIGHUP, SIGUSR1, SIGTERM};

bool ignored_before(int number) {
    struct sigaction before {};
    sigaction(number, nullptr, &before);
    return before.sa_handler == SIG_IGN;
}

}  // namespace

StopSignals::StopSignals() {
    check(!installed.exchange(true), "signals are caught once");
    first_signal_ns = 0;
    is_to_end = false;
    const bool under_mpirun = std::getenv("OMPI_COMM_WORLD_RANK") != nullptr;
    for (const int number : caught) {
        if (ignored_before(number) || (number == SIGTERM && under_mpirun)) continue;
        struct sigaction action {};
        action.sa_handler = on_signal;
        action.sa_flags = SA_RESTART;  // interrupted reads and writes continue
        sigaction(number, &action, nullptr);
    }
    accept_stop_signals();
}

StopSignals::~StopSignals() {
    for (const int number : caught) {
        if (!ignored_before(number)) std::signal(number, SIG_DFL);
    }
    on_first = on_second = nullptr;
    installed = false;
}

void StopSignals::answer_with(std::string acknowledgement, std::string farewell) {
    acknowledgement_ = std::move(acknowledgement);
    farewell_ = std::move(farewell);
    on_first = &acknowledgement_;
    on_second = &farewell_;
}

bool StopSignals::here() const { return first_signal_ns != 0; }

void StopSignals::forget_interrupt() {
    if (!is_to_end) first_signal_ns = 0;
}

bool on_any_rank(Communicator& ranks, bool here) {
    double count = here ? 1 : 0;
    ranks.all_reduce({reinterpret_cast<std::byte*>(&count), DType::fp64, {1}});
    return count > 0;
}

}  // namespace llmc
