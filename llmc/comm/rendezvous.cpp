#include "llmc/comm/rendezvous.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <optional>
#include <random>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "llmc/comm/hello_listener.h"
#include "llmc/core/error.h"

namespace llmc {
namespace {

using namespace rendezvous;

using Clock = std::chrono::steady_clock;

// Time limits for resolving a host name, for one attempt to connect, and for writing an answer.
constexpr std::chrono::seconds resolving_time{20};
constexpr std::chrono::seconds attempt_time{10};
constexpr std::chrono::seconds writing_time{10};
// If a connection fails because the job has failed, rank 0's news of that may take this long to arrive.
constexpr std::chrono::seconds news_time{2};
constexpr std::chrono::milliseconds pause{50};

using What = Answer::What;

Deadline deadline_after(std::chrono::duration<double> time) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(time);
}

bool tell(const Socket& socket, What what, std::uint64_t key = 0) {
    Answer answer;
    answer.what = what;
    answer.key = key;
    return send_all(socket, bytes_of(answer), deadline_after(writing_time));
}

// The ranks whose links are not complete, as text.
std::string missing_ranks(const std::vector<Link>& links, int own) {
    std::string text;
    int count = 0;
    for (int rank = 0; rank < static_cast<int>(links.size()); ++rank) {
        const Link& link = links[static_cast<std::size_t>(rank)];
        if (rank == own || (link.messages && link.notices)) continue;
        if (++count <= 8) text += fmt::format("{}{}", text.empty() ? "" : ", ", rank);
    }
    return fmt::format("{} {}{}", count == 1 ? "rank" : "ranks", text,
                       count > 8 ? fmt::format(" and {} more", count - 8) : "");
}

// One process's side of the rendezvous.
class Rendezvous {
  public:
    explicit Rendezvous(const Invitation& invitation)
        : invitation_(invitation),
          links_(static_cast<std::size_t>(invitation.size)),
          end_(deadline_after(invitation.patience)),
          door_(invitation.listener ? Listener(Socket(*invitation.listener))
                                    : Listener(invitation.rank == 0 ? invitation.port : std::uint16_t{0})) {}

    std::vector<Link> take_place() {
        try {
            invitation_.rank == 0 ? receive_all_ranks() : go_to_all_ranks();
        } catch (const std::exception&) {
            // Tells the processes that wait for this one that the job has failed. Otherwise they would report
            // that this process is gone.
            for (const Link& link : links_)
                if (link.notices) tell(link.notices, What::ended);
            throw;
        }
        return std::move(links_);
    }

  private:
    Link& link(int rank) { return links_[static_cast<std::size_t>(rank)]; }
    static Socket& channel(Link& link, Channel channel) {
        return channel == Channel::messages ? link.messages : link.notices;
    }

    // The files of all open notice connections. Until all ranks have come, they carry data only if a rank
    // fails.
    std::vector<int> watched() const {
        std::vector<int> files;
        for (const Link& link : links_)
            if (link.notices) files.push_back(link.notices.file());
        return files;
    }

    bool is_whole() const {
        int whole = 0;
        for (const Link& link : links_) whole += link.messages && link.notices ? 1 : 0;
        return whole == invitation_.size - 1;
    }

    // ---- rank 0

    void receive_all_ranks() {
        // fails now if the host name cannot be resolved, since the others could not resolve it either
        resolve_host();
        while (!is_whole()) {
            std::optional<Arrival> arrival = door_.next(end_, watched());
            if (arrival) {
                admit(std::move(*arrival));
            } else {
                hear_ranks(What::ended);
                if (milliseconds_until(end_) == 0) refuse_to_wait();
            }
        }
        end_ = deadline_after(invitation_.patience);
        send_table();
        // Each rank then reports that it is ready.
        for (int ready = 0; ready < invitation_.size - 1;) {
            ready += hear_ranks(What::ready);
            if (ready < invitation_.size - 1 && milliseconds_until(end_) == 0) {
                user_error("the processes could not connect to each other within {:g} s; {}",
                           invitation_.patience.count(), connect_advice);
            }
        }
        for (const Link& other : links_)
            if (other.notices) tell(other.notices, What::go);
    }

    void admit(Arrival arrival) {
        const Hello& hello = arrival.hello;
        try {
            check_guest(hello);
        } catch (const UserError&) {
            tell(arrival.socket, What::ended);
            throw;
        }
        if (hello.channel == Channel::notices) {
            ports_.resize(links_.size());
            ports_[static_cast<std::size_t>(hello.rank)] = hello.port;
            tell(arrival.socket, What::welcome);
        }
        channel(link(hello.rank), hello.channel) = std::move(arrival.socket);
    }

    void check_guest(const Hello& hello) {
        const std::string version = text_of(hello.version);
        if (version != invitation_.version) {
            user_error(
                "a process runs train_gpt {}, but the one with RANK=0 runs train_gpt {}; start the same "
                "build everywhere",
                version, invitation_.version);
        }
        if (hello.size != invitation_.size) {
            user_error(
                "a process has RANK={} and WORLD_SIZE={}, but the one with RANK=0 has WORLD_SIZE={}; give "
                "all the same WORLD_SIZE",
                hello.rank, hello.size, invitation_.size);
        }
        if (hello.rank == 0 || channel(link(hello.rank), hello.channel)) {
            user_error("two processes have RANK={}; give each of the {} processes its own, from 0 to {}",
                       hello.rank, invitation_.size, invitation_.size - 1);
        }
    }

    [[noreturn]] void refuse_to_wait() const {
        std::array<char, 256> machine{};
        gethostname(machine.data(), machine.size() - 1);
        user_error(
            "{} of {} did not connect to {} (port {}), where RANK=0 runs, within {:g} s; start all with this "
            "machine as MASTER_ADDR, and see their output (TRAIN_GPT_CONNECT_SECONDS sets the time limit)",
            missing_ranks(links_, invitation_.rank), invitation_.size, machine.data(), invitation_.port,
            invitation_.patience.count());
    }

    void send_table() {
        std::vector<Endpoint> places(links_.size());
        for (std::size_t rank = 1; rank < places.size(); ++rank) {
            places[rank].host = letters<60>(address_of_peer(links_[rank].notices).host);
            places[rank].port = ports_[rank];
        }
        std::random_device random;
        key_ = (std::uint64_t{random()} << 32 | random()) | 1;
        for (const Link& other : links_) {
            if (!other.notices) continue;
            tell(other.notices, What::table, key_);
            send_all(other.notices, std::as_bytes(std::span(places)), deadline_after(writing_time));
        }
    }

    // Waits up to a second (not at all for What::ended) for answers of the other ranks. Returns how many gave
    // the expected one. Throws if a connection is lost or a rank reports that the job has failed.
    int hear_ranks(What expected) {
        std::vector<pollfd> files;
        for (const Link& other : links_) files.push_back({other.notices.file(), POLLIN, 0});
        ::poll(files.data(), files.size(), expected == What::ended ? 0 : milliseconds_until(end_));
        int told = 0;
        for (int rank = 1; rank < invitation_.size; ++rank) {
            if (files[static_cast<std::size_t>(rank)].revents == 0) continue;
            const Answer answer = hear(link(rank).notices, rank);
            if (answer.what == What::ended) throw EndsQuietly();
            if (answer.what == expected) ++told;
        }
        return told;
    }

    // ---- the other ranks

    void go_to_all_ranks() {
        Hello hello;
        hello.version = letters<120>(invitation_.version);
        hello.rank = invitation_.rank;
        hello.size = invitation_.size;
        hello.port = door_.port();
        link(0).notices = find_rank_0(hello);
        const Address host = address_of_peer(link(0).notices);
        hello.channel = Channel::messages;
        link(0).messages = connect_and_greet(0, host, hello);

        // Rank 0 has its own time limit, which may have begun later.
        end_ = deadline_after(2 * invitation_.patience + writing_time);
        const Answer answer = hear(link(0).notices, 0);
        if (answer.what != What::table) throw EndsQuietly();
        std::vector<Endpoint> places(links_.size());
        if (!llmc::receive_all(link(0).notices, std::as_writable_bytes(std::span(places)), end_)) lost(0);
        key_ = hello.key = answer.key;
        for (int rank = 1; rank < invitation_.rank; ++rank) {
            const Endpoint& place = places[static_cast<std::size_t>(rank)];
            Address address{text_of(place.host), static_cast<std::uint16_t>(place.port)};
            // That process runs on rank 0's machine: use the address at which this process found rank 0.
            if (address.is_loopback()) address.host = host.host;
            for (const Channel kind : {Channel::notices, Channel::messages}) {
                hello.channel = kind;
                channel(link(rank), kind) = connect_and_greet(rank, address, hello);
            }
        }
        await_higher_ranks();
        tell(link(0).notices, What::ready);
        if (hear(link(0).notices, 0).what != What::go) throw EndsQuietly();
    }

    // The connection on which rank 0 answered with welcome.
    Socket find_rank_0(const Hello& hello) {
        const std::vector<Address> addresses = resolve_host();
        std::string why;
        do {
            for (const Address& address : addresses) {
                const Deadline end = std::min(end_, deadline_after(attempt_time));
                Socket socket = connect_to(address, end, why);
                if (!socket) continue;
                Answer answer{};
                answer.mark = {};
                if (!send_all(socket, bytes_of(hello), end) ||
                    !llmc::receive_all(socket, bytes_of(answer.mark), end)) {
                    why = "the program there does not answer";
                    continue;
                }
                if (answer.mark != answer_mark) {
                    user_error(
                        "another program uses {}:{}; choose another MASTER_PORT, the same for all "
                        "processes",
                        invitation_.host, invitation_.port);
                }
                if (!llmc::receive_all(socket, bytes_of(answer).subspan(sizeof(Mark)), end)) continue;
                if (answer.what != What::welcome) throw EndsQuietly();
                return socket;
            }
            std::this_thread::sleep_for(pause);
        } while (milliseconds_until(end_) > 0);
        user_error(
            "no process with RANK=0 answered at {}:{} within {:g} s: {}; start it there, or correct "
            "MASTER_ADDR and MASTER_PORT (TRAIN_GPT_CONNECT_SECONDS sets the time limit)",
            invitation_.host, invitation_.port, invitation_.patience.count(), why);
    }

    std::vector<Address> resolve_host() const {
        const Deadline end = std::min(end_, deadline_after(resolving_time));
        while (true) {
            std::string why;
            std::vector<Address> addresses = resolve(invitation_.host, invitation_.port, why);
            if (!addresses.empty()) return addresses;
            if (milliseconds_until(end) == 0) {
                user_error(
                    "MASTER_ADDR: cannot find the machine '{}': {}; give the name or address of the machine "
                    "where RANK=0 runs",
                    invitation_.host, why);
            }
            std::this_thread::sleep_for(pause);
        }
    }

    Socket connect_and_greet(int rank, const Address& address, const Hello& hello) const {
        std::string why;
        const Deadline end = std::min(end_, deadline_after(attempt_time));
        Socket socket = connect_to(address, end, why);
        if (!socket || !send_all(socket, bytes_of(hello), end)) {
            if (job_has_ended()) throw EndsQuietly();
            user_error("rank {} cannot connect to rank {} at {} (port {}): {}; {}", invitation_.rank, rank,
                       address.host, address.port, why, connect_advice);
        }
        return socket;
    }

    // Whether rank 0 says that the job has failed; another process then reports why.
    bool job_has_ended() const {
        Answer answer;
        return llmc::receive_all(links_[0].notices, bytes_of(answer), deadline_after(news_time)) &&
               answer.what == What::ended;
    }

    void await_higher_ranks() {
        while (!is_whole()) {
            const std::array watched = {link(0).notices.file()};
            std::optional<Arrival> arrival = door_.next(end_, watched);
            if (!arrival) {
                // The only message that rank 0 sends at this point is that the job has failed.
                hear(link(0).notices, 0);
                throw EndsQuietly();
            }
            const Hello& hello = arrival->hello;
            if (hello.key != key_ || hello.rank <= invitation_.rank || hello.rank >= invitation_.size)
                continue;
            channel(link(hello.rank), hello.channel) = std::move(arrival->socket);
        }
    }

    Answer hear(const Socket& socket, int rank) const {
        Answer answer;
        if (!llmc::receive_all(socket, bytes_of(answer), end_)) lost(rank);
        return answer;
    }

    [[noreturn]] static void lost(int rank) {
        user_error("the process with RANK={} ended before all processes were connected; see its output",
                   rank);
    }

    static constexpr std::string_view connect_advice =
        "the machines must reach each other at any port; check their firewalls";

    const Invitation& invitation_;
    std::vector<Link> links_;
    std::vector<std::int32_t> ports_;  // the port at which each rank listens; used by rank 0
    std::uint64_t key_ = 0;            // identifies the job; keeps processes of other jobs out
    Deadline end_;
    HelloListener door_;
};

}  // namespace

std::vector<Link> find_peers(const Invitation& invitation) {
    allow_connections_to_all(invitation.size);
    return Rendezvous(invitation).take_place();
}

}  // namespace llmc
