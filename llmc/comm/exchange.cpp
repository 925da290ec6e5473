#include "llmc/comm/exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <thread>

#include "llmc/core/error.h"

namespace llmc {
namespace {

using Clock = std::chrono::steady_clock;

// A waiting rank first yields its core at every poll, which answers fastest, then naps, so that ranks that
// share the core with it are not slowed by its polling.
constexpr Seconds yield_time{1e-3};
constexpr std::chrono::microseconds nap{50};

// A poll that comes late counts for no more than this: a job that was stopped and continued as a whole has
// not waited for anyone.
constexpr Seconds longest_counted_pause{1.0};

// Turns to speak: their seconds, and after how many ranks the first one's comes again.
constexpr double turn = 0.2;
constexpr int most_turns = 16;

int world_rank() {
    int rank = 0;
    check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
    return rank;
}

int world_size() {
    int size = 0;
    check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
    return size;
}

bool is_waiting_too(int rank) { return has_told(rank, watchdog_tag); }

std::string listed(std::span<const int> ranks) {
    constexpr std::size_t most = 8;
    std::string text;
    for (const int rank : ranks.first(std::min(most, ranks.size())))
        text += fmt::format("{}{}", text.empty() ? "" : ", ", rank);
    if (ranks.size() > most) text += fmt::format(" and {} more", ranks.size() - most);
    return text;
}

}  // namespace

void check_mpi(int code, std::string_view call, std::source_location where) {
    if (code == MPI_SUCCESS) return;
    std::array<char, MPI_MAX_ERROR_STRING> text{};
    int length = 0;
    MPI_Error_string(code, text.data(), &length);
    programming_error(fmt::format("{}: {}", call, text.data()), where);
}

void tell_others(int tag) {
    for (int rank = 0; rank < world_size(); ++rank) {
        if (rank == world_rank()) continue;
        MPI_Request request = MPI_REQUEST_NULL;
        check_mpi(MPI_Isend(nullptr, 0, MPI_BYTE, rank, tag, MPI_COMM_WORLD, &request), "MPI_Isend");
        check_mpi(MPI_Request_free(&request), "MPI_Request_free");
    }
}

bool has_told(int rank, int tag) {
    int told = 0;
    check_mpi(MPI_Iprobe(rank, tag, MPI_COMM_WORLD, &told, MPI_STATUS_IGNORE), "MPI_Iprobe");
    return told != 0;
}

void abort_job(std::string_view line) {
    std::fflush(stdout);
    // One write, so that lines of several processes do not mix.
    const std::string text = fmt::format("{}\n", line);
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
    MPI_Abort(MPI_COMM_WORLD, 1);
    std::_Exit(1);
}

bool is_turn_to_speak(int rank, int size, double overdue, double clock) {
    const int turns = std::min(size, most_turns);
    const int earlier_ranks = rank / most_turns * most_turns;
    const double now = clock / turn;
    const bool own = static_cast<std::int64_t>(std::floor(now)) % turns == rank % turns;
    // Only in the first half: the second separates this turn from the next rank's.
    return overdue >= earlier_ranks * turn && own && now - std::floor(now) < 0.5;
}

void Exchange::begin(int tag, std::string_view call) {
    requests_.clear();
    messages_.clear();
    tag_ = tag;
    call_ = call;
    bytes_sent_ = 0;
    told_ = false;
}

template <class Post>
void Exchange::post_in_parts(std::size_t bytes, const Post& post) {
    std::size_t first = 0;
    do {
        const std::size_t part = std::min(bytes - first, options_.largest_message);
        requests_.push_back(MPI_REQUEST_NULL);
        post(first, static_cast<int>(part), &requests_.back());
        first += part;
    } while (first < bytes);
}

void Exchange::send(int to, const std::byte* data, std::size_t bytes) {
    post_in_parts(bytes, [&](std::size_t first, int count, MPI_Request* request) {
        check_mpi(MPI_Isend(data + first, count, MPI_BYTE, to, tag_, MPI_COMM_WORLD, request), "MPI_Isend");
        messages_.push_back({to, false, count});
    });
    bytes_sent_ += bytes;
}

void Exchange::recv(int from, std::byte* data, std::size_t bytes) {
    post_in_parts(bytes, [&](std::size_t first, int count, MPI_Request* request) {
        check_mpi(MPI_Irecv(data + first, count, MPI_BYTE, from, tag_, MPI_COMM_WORLD, request), "MPI_Irecv");
        messages_.push_back({from, true, count});
    });
}

void Exchange::wait() {
    const int total = static_cast<int>(requests_.size());
    indices_.resize(requests_.size());
    statuses_.resize(requests_.size());
    int open = total;
    Seconds waited{0};
    Clock::time_point last = Clock::now();
    while (open > 0) {
        int done = 0;
        const int code = MPI_Testsome(total, requests_.data(), &done, indices_.data(), statuses_.data());
        if (code != MPI_ERR_IN_STATUS) check_mpi(code, "MPI_Testsome");
        for (int i = 0; i < done; ++i) {
            const auto k = static_cast<std::size_t>(i);
            const Message& message = messages_[static_cast<std::size_t>(indices_[k])];
            if (code == MPI_ERR_IN_STATUS) check_mpi(statuses_[k].MPI_ERROR, call_);
            check_arrived(statuses_[k], message);
        }
        open -= done;

        const Clock::time_point now = Clock::now();
        waited = done > 0 ? Seconds{0} : waited + std::min(Seconds(now - last), longest_counted_pause);
        last = now;
        if (open == 0) break;
        watch(waited);
        if (waited < yield_time) {
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(nap);
        }
    }
    requests_.clear();
    messages_.clear();
}

// MPI accepts a message that is shorter than its buffer; here it means that two ranks disagree on a size.
void Exchange::check_arrived(const MPI_Status& status, const Message& message) const {
    if (!message.receives) return;
    int bytes = 0;
    check_mpi(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    if (bytes == message.bytes) return;
    programming_error(fmt::format("{}: rank {} sent {} bytes where rank {} expects {}", call_, message.peer,
                                  bytes, world_rank(), message.bytes));
}

void Exchange::watch(Seconds waited) {
    // Ranks in a chain of waiting are not the one that is stuck: so that none of them is named, a rank that has
    // waited for long tells all others once.
    if (!told_ && waited > options_.timeout / 2) {
        tell_others(watchdog_tag);
        told_ = true;
    }
    if (waited <= options_.timeout) return;
    const double overdue = (waited - options_.timeout).count();
    const Seconds clock = std::chrono::system_clock::now().time_since_epoch();
    if (!is_turn_to_speak(world_rank(), world_size(), overdue, clock.count())) return;
    const std::vector<int> ranks = awaited();
    std::vector<int> silent = ranks;
    std::erase_if(silent, is_waiting_too);
    if (!silent.empty()) report(silent, silent.size() == 1 ? "does not answer" : "do not answer");
    // Those waited for are waiting as well, so it is for others to speak. Where none of them has done so when
    // the last rank has had its turn, all wait for each other.
    const double all_turns = (world_size() + most_turns) * turn;
    if (overdue > all_turns + 1) report(ranks, ranks.size() == 1 ? "waits too" : "wait too");
}

// The ranks whose messages are missing, or where there are none, those that take none.
std::vector<int> Exchange::awaited() const {
    std::vector<int> senders;
    std::vector<int> receivers;
    for (std::size_t i = 0; i < requests_.size(); ++i)
        if (requests_[i] != MPI_REQUEST_NULL)
            (messages_[i].receives ? senders : receivers).push_back(messages_[i].peer);
    std::vector<int>& ranks = senders.empty() ? receivers : senders;
    std::ranges::sort(ranks);
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
}

void Exchange::report(const std::vector<int>& ranks, std::string_view what_they_do) const {
    abort_job(fmt::format("error: rank {} waited {} s in {} for {} {}, which {}; the job ends", world_rank(),
                          options_.timeout.count(), call_, ranks.size() == 1 ? "rank" : "ranks",
                          listed(ranks), what_they_do));
}

}  // namespace llmc
