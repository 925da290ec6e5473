// Messages over TCP (transport.h).
#include <fmt/format.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string>
#include <thread>

#include "llmc/comm/connection.h"
#include "llmc/comm/notices.h"
#include "llmc/comm/rendezvous.h"
#include "llmc/comm/transport.h"
#include "llmc/core/error.h"

namespace llmc {
namespace {

using Clock = std::chrono::steady_clock;

// How long a process that has reached the end of the job waits for the others.
constexpr std::chrono::seconds patience{10};
// How long a rank may take to answer, or to report why the job fails. On a busy machine this takes some
// tenths of a second.
constexpr std::chrono::seconds answer_time{5};
// After the news that other ranks have ended, the news of the failed rank may take this long to arrive.
constexpr std::chrono::milliseconds news_time{50};
// How long a busy process may take to notice by itself that the job fails.
constexpr std::chrono::milliseconds busy_time{1000};

class TcpTransport;

class TcpMessages final : public Messages {
  public:
    explicit TcpMessages(TcpTransport& transport) : transport_(transport) {}
    ~TcpMessages() override { withdraw_all(); }

    void begin(int tag, std::string_view call) override {
        withdraw_all();
        tag_ = tag;
        call_ = call;
    }
    void send(int to, const std::byte* data, std::size_t bytes) override {
        post({.peer = to, .tag = tag_, .receives = false, .source = data, .bytes = bytes});
    }
    void recv(int from, std::byte* data, std::size_t bytes) override {
        post({.peer = from, .tag = tag_, .receives = true, .room = data, .bytes = bytes});
    }
    bool poll() override;
    std::size_t open() const override { return open_; }
    bool is_done(std::size_t message) const override { return parcels_[message]->done; }

  private:
    void post(const Parcel& parcel);
    void withdraw_all();

    TcpTransport& transport_;
    int tag_ = 0;
    std::string_view call_;
    std::vector<std::unique_ptr<Parcel>> parcels_;  // reused after begin()
    std::size_t used_ = 0;                          // number of parcels in use
    std::size_t open_ = 0;
};

class TcpTransport final : public Transport {
  public:
    TcpTransport(int rank, std::vector<Link> links) : rank_(rank), notices_(rank, take_notices(links)) {
        for (Link& link : links) connections_.emplace_back(std::move(link.messages));
        if (size() > 1) start_listening();
    }
    ~TcpTransport() override { stop_listening(); }
    TcpTransport(const TcpTransport&) = delete;
    TcpTransport& operator=(const TcpTransport&) = delete;

    int rank() const override { return rank_; }
    int size() const override { return static_cast<int>(connections_.size()); }
    int largest_tag() const override { return std::numeric_limits<int>::max(); }
    std::unique_ptr<Messages> messages() override { return std::make_unique<TcpMessages>(*this); }

    void tell_waiting(bool waits) override { notices_.say(waits ? Notice::waits : Notice::goes_on); }
    bool is_waiting(int rank) override { return notices_.from(rank).long_waits > 0; }
    void hear() override {}  // the listener thread does this

    // Rank 0 lets the first rank that asks report the error. If rank 0 is gone or does not answer, rank 1
    // decides, and so on. The listener thread answers, also while the rank computes.
    bool reports_failure(std::span<const int> silent) override {
        take_the_end();
        for (int rank = 0; rank < rank_; ++rank) {
            if (std::ranges::find(silent, rank) != silent.end()) continue;
            if (const std::optional<bool> reports = ask(rank)) return *reports;
        }
        return may_report(rank_) || !reason_is_reported();
    }

    void finish() override {
        notices_.say(Notice::done);
        const auto end = Clock::now() + patience;
        while (!notices_.have_all_ended() && Clock::now() < end)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        stop_listening();
    }

    [[noreturn]] void end(int status) override {
        finish();
        std::fflush(stdout);
        std::_Exit(status);
    }

    void end_if_lost() override {
        if (notices_.has_trouble()) fail_job(*this, lost_line(find_lost()));
    }

    [[noreturn]] void abort() override {
        take_the_end();
        notices_.say(Notice::failed);
        std::_Exit(1);
    }

    [[noreturn]] void give_way() override {
        take_the_end();
        notices_.say(Notice::ends);
        std::fflush(stdout);
        std::_Exit(1);
    }

    Connection& connection(int rank) { return connections_[static_cast<std::size_t>(rank)]; }

    // Returns whether anything moved. If the job has failed, it does not return: it throws LostRank if this
    // rank may have to report that.
    bool move() {
        bool any = false;
        for (Connection& connection : connections_)
            if (!connection.is_idle() && connection.move()) any = true;
        if (notices_.has_trouble()) throw_lost(find_lost());
        for (int rank = 0; rank < size(); ++rank) {
            if (!connection(rank).is_closed() || connection(rank).is_idle()) continue;
            // A rank that said `done` has ended in order, so its missing messages will never come. If it did
            // not say `done`, the listener thread soon learns from its notices what happened.
            if (notices_.from(rank).done) throw_lost(rank);
        }
        return any;
    }

  private:
    static std::vector<Socket> take_notices(std::vector<Link>& links) {
        std::vector<Socket> sockets;
        for (Link& link : links) sockets.push_back(std::move(link.notices));
        return sockets;
    }

    // Waits until the condition holds. False if it did not within the limit.
    template <class Condition>
    bool await(std::chrono::milliseconds limit, const Condition& condition) {
        for (const auto end = Clock::now() + limit;;) {
            hear_by_now();
            if (condition()) return true;
            if (Clock::now() >= end) return false;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }

    // Whether `rank` may report why the job fails. True for the first rank for which this is called here.
    bool may_report(int rank) {
        int nobody = -1;
        return reporter_.compare_exchange_strong(nobody, rank);
    }

    // Asks another rank whether this rank may report the error. Empty if that rank is gone or does not
    // answer.
    std::optional<bool> ask(int rank) {
        if (notices_.somebody_says_why()) return false;
        const Heard& heard = notices_.from(rank);
        notices_.say(Notice::asks, rank);
        await(answer_time,
              [&] { return heard.granted || heard.refused || heard.gone || notices_.somebody_says_why(); });
        if (heard.granted) return true;
        if (heard.refused) return !reason_is_reported();
        return notices_.somebody_says_why() ? std::optional(false) : std::nullopt;
    }

    // Whether the rank that may report the error does so in time. If not, this rank must.
    bool reason_is_reported() {
        return await(answer_time, [&] { return notices_.somebody_says_why(); });
    }

    // The rank that is gone without an explanation. Does not return if another rank reports why the job ends.
    int find_lost() {
        if (await(news_time, [&] { return notices_.somebody_says_why(); })) give_way();
        int rank = 0;
        while (!notices_.from(rank).gone || notices_.from(rank).done) ++rank;
        return rank;
    }

    // If two threads try to end the process, the first one ends it and the other one waits.
    void take_the_end() {
        std::thread::id ender;
        if (ender_.compare_exchange_strong(ender, std::this_thread::get_id())) return;
        if (ender != std::this_thread::get_id()) std::this_thread::sleep_for(std::chrono::hours(1));
    }

    std::string lost_line(int lost) const {
        return fmt::format(
            "rank {} is gone: its process or its machine stopped; see its last output, or that machine's log "
            "(out of memory?); the job ends",
            lost);
    }
    [[noreturn]] void throw_lost(int rank) const { throw LostRank(lost_line(rank)); }

    // ---- the listener thread, which receives notices

    void start_listening() {
        wake_ = Socket(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        check(static_cast<bool>(wake_), "the system creates an eventfd");
        // Signals must go to the other threads.
        sigset_t all{};
        sigset_t before{};
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        listener_ = std::thread([this] { listen(); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void stop_listening() {
        if (!listener_.joinable()) return;
        stops_ = true;
        const std::uint64_t one = 1;
        if (write(wake_.file(), &one, sizeof one) < 0) std::abort();  // an eventfd always takes this
        listener_.join();
    }

    void listen() {
        while (!stops_) {
            hear_notices(notices_.has_trouble() ? busy_time : std::chrono::milliseconds(-1));
            if (notices_.has_trouble() && Clock::now() >= notices_.trouble_since() + busy_time)
                end_busy_process();
        }
    }

    // Receives notices that have arrived if this is the listener thread, which does not listen while it ends
    // the process. Does nothing on other threads.
    void hear_by_now() {
        if (std::this_thread::get_id() == listener_.get_id()) hear_notices(std::chrono::milliseconds(0));
    }

    void hear_notices(std::chrono::milliseconds limit) {
        notices_.hear(limit, wake_.file(), [this](int rank) { return may_report(rank); });
    }

    // Ends the process as the thread that communicates would.
    void end_busy_process() {
        if (ender_.load() != std::thread::id()) return;
        take_the_end();
        end_if_lost();
    }

    int rank_;
    std::vector<Connection> connections_;  // by rank; its own entry is never used
    Notices notices_;
    std::atomic<std::thread::id> ender_{};
    std::atomic<int> reporter_ = -1;  // the rank that may report why the job fails, according to this one
    std::atomic<bool> stops_ = false;
    Socket wake_;
    std::thread listener_;
};

bool TcpMessages::poll() {
    if (open_ == 0) return false;
    const bool any = transport_.move();
    open_ = 0;
    for (std::size_t i = 0; i < used_; ++i) {
        const Parcel& parcel = *parcels_[i];
        if (!parcel.done) ++open_;
        if (parcel.done && parcel.receives && parcel.sent != parcel.bytes) {
            programming_error(fmt::format("{}: rank {} sent {} bytes where rank {} expects {}", call_,
                                          parcel.peer, parcel.sent, transport_.rank(), parcel.bytes));
        }
    }
    return any;
}

void TcpMessages::post(const Parcel& parcel) {
    if (used_ == parcels_.size()) parcels_.push_back(std::make_unique<Parcel>());
    *parcels_[used_] = parcel;
    transport_.connection(parcel.peer).post(*parcels_[used_]);
    ++used_;
    ++open_;
}

// Withdraws messages that an exception left in flight.
void TcpMessages::withdraw_all() {
    for (std::size_t i = 0; i < used_ && open_ > 0; ++i)
        if (!parcels_[i]->done) transport_.connection(parcels_[i]->peer).withdraw(*parcels_[i]);
    used_ = open_ = 0;
}

}  // namespace

std::unique_ptr<Transport> make_tcp_transport(int rank, std::vector<Link> links) {
    return std::make_unique<TcpTransport>(rank, std::move(links));
}

std::unique_ptr<Transport> make_lone_transport() { return make_tcp_transport(0, std::vector<Link>(1)); }

}  // namespace llmc
