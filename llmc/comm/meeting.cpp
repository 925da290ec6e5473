#include "llmc/comm/meeting.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <random>
#include <span>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>

#include "llmc/core/error.h"

namespace llmc {
namespace {

using Clock = std::chrono::steady_clock;

// How long a name may be unknown (it may be about to be made), one attempt to connect may last, and what answers may
// take to be written.
constexpr std::chrono::seconds resolving_time{20};
constexpr std::chrono::seconds attempt_time{10};
constexpr std::chrono::seconds writing_time{10};
constexpr std::chrono::milliseconds pause{50};

template <std::size_t N>
std::array<char, N> letters(std::string_view text) {
    std::array<char, N> array{};
    std::copy_n(text.begin(), std::min(N, text.size()), array.begin());
    return array;
}

template <std::size_t N>
std::string text_of(const std::array<char, N>& letters) {
    return {letters.data(), strnlen(letters.data(), N)};
}

using Mark = std::array<char, 8>;
const Mark hello_mark = letters<8>("llmc-me?");
const Mark answer_mark = letters<8>("llmc-yes");

enum class Channel : std::int32_t { notices, messages };

// What a process says first on a connection. Its mark, its length and the place of the version are the same in all
// versions of the program.
struct Hello {
    Mark mark = hello_mark;
    std::array<char, 120> version{};
    std::uint64_t key = 0;  // of the job; 0 where it is not known yet, at rank 0
    std::int32_t rank = 0;
    std::int32_t size = 0;
    Channel channel = Channel::notices;
    std::int32_t port = 0;  // where it listens itself
    std::array<char, 104> reserved{};
};
static_assert(sizeof(Hello) == 256 && std::is_trivially_copyable_v<Hello>);

// What rank 0 answers, and what others tell it, on the connection for notices.
struct Answer {
    enum class What : std::int32_t {
        welcome,  // as the first answer
        table,    // all have come: a Place for each rank follows
        ready,    // of a rank: it has all its links
        go,       // all have
        ended     // the job has failed, and somebody says why
    };
    Mark mark = answer_mark;
    What what = What::welcome;
    std::int32_t reserved = 0;
    std::uint64_t key = 0;
};
using What = Answer::What;
static_assert(sizeof(Answer) == 24 && std::is_trivially_copyable_v<Answer>);

struct Place {
    std::array<char, 60> host{};
    std::int32_t port = 0;
};
static_assert(sizeof(Place) == 64);

struct Arrival {
    Hello hello;
    Socket socket;
};

Deadline deadline_after(std::chrono::duration<double> time) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(time);
}

bool tell(const Socket& socket, What what, std::uint64_t key = 0) {
    Answer answer;
    answer.what = what;
    answer.key = key;
    return send_all(socket, bytes_of(answer), deadline_after(writing_time));
}

// A listener, and those who have come to it and have not said yet who they are.
class Door {
  public:
    explicit Door(std::uint16_t port) : listener_(port) {}

    std::uint16_t port() const { return listener_.port(); }

    // The next who says hello. None if the time is over, or as soon as one of the files `watched` can be read.
    std::optional<Arrival> next(Deadline end, std::span<const int> watched) {
        while (true) {
            std::vector<pollfd> files = {{listener_.socket().file(), POLLIN, 0}};
            for (const int file : watched) files.push_back({file, POLLIN, 0});
            for (const Stranger& stranger : strangers_) files.push_back({stranger.socket.file(), POLLIN, 0});
            ::poll(files.data(), files.size(), milliseconds_until(end));
            for (std::size_t i = 0; i < watched.size(); ++i)
                if (files[1 + i].revents != 0) return std::nullopt;
            std::erase_if(strangers_, [](Stranger& stranger) { return !listen_to(stranger); });
            const auto known = std::ranges::find(strangers_, sizeof(Hello), &Stranger::heard);
            if (known != strangers_.end()) {
                Arrival arrival{known->hello, std::move(known->socket)};
                strangers_.erase(known);
                return arrival;
            }
            if (Socket socket = listener_.accept()) {
                strangers_.push_back({std::move(socket), {}, 0});
            } else if (files[0].revents != 0) {
                std::this_thread::sleep_for(pause);  // gone again, or there are too many files
            }
            if (milliseconds_until(end) == 0) return std::nullopt;
        }
    }

  private:
    struct Stranger {
        Socket socket;
        Hello hello;
        std::size_t heard = 0;
    };

    // Whether it may still be one of the job.
    static bool listen_to(Stranger& stranger) {
        const std::span<std::byte> whole = bytes_of(stranger.hello);
        const Moved part = receive_some(stranger.socket, whole.subspan(stranger.heard));
        stranger.heard += part.bytes;
        if (part.closed && stranger.heard < whole.size()) return false;
        const std::size_t of_mark = std::min(stranger.heard, sizeof(Mark));
        return std::memcmp(&stranger.hello, &hello_mark, of_mark) == 0;
    }

    Listener listener_;
    std::vector<Stranger> strangers_;
};

// The ranks whose links are not whole, as text.
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

// Where one process of the job meets the others.
class Meeting {
  public:
    explicit Meeting(const Invitation& invitation)
        : invitation_(invitation),
          links_(static_cast<std::size_t>(invitation.size)),
          end_(deadline_after(invitation.patience)),
          door_(invitation.rank == 0 ? invitation.port : std::uint16_t{0}) {}

    std::vector<Link> take_place() {
        try {
            invitation_.rank == 0 ? receive_all_ranks() : go_to_all_ranks();
        } catch (const std::exception&) {
            // Whoever waits for this process need not say that it is gone.
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

    // The connections for notices that are there, which are silent but where something goes wrong.
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
        resolve_host();  // what the others will not find need not be waited for
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
        // Each then tells that it is ready.
        for (int ready = 0; ready < invitation_.size - 1;) {
            ready += hear_ranks(What::ready);
            if (ready < invitation_.size - 1 && milliseconds_until(end_) == 0) {
                user_error("the processes could not connect to one another within {:g} s; {}",
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
                "a process is train_gpt {}, but the one with RANK=0 is train_gpt {}; all must be the same "
                "build",
                version, invitation_.version);
        }
        if (hello.size != invitation_.size) {
            user_error(
                "a process has RANK={} and WORLD_SIZE={}, but the one with RANK=0 has WORLD_SIZE={}; all "
                "need the same",
                hello.rank, hello.size, invitation_.size);
        }
        if (hello.rank == 0 || channel(link(hello.rank), hello.channel)) {
            user_error("two processes have RANK={}; each of the {} needs its own, from 0 to {}", hello.rank,
                       invitation_.size, invitation_.size - 1);
        }
    }

    [[noreturn]] void refuse_to_wait() const {
        std::array<char, 256> machine{};
        gethostname(machine.data(), machine.size() - 1);
        user_error(
            "{} of {} did not come to {} (port {}), where RANK=0 runs, within {:g} s; start all, with this "
            "machine as their MASTER_ADDR, and see what they say (TRAIN_GPT_CONNECT_SECONDS is how long they "
            "wait)",
            missing_ranks(links_, invitation_.rank), invitation_.size, machine.data(), invitation_.port,
            invitation_.patience.count());
    }

    void send_table() {
        std::vector<Place> places(links_.size());
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

    // Waits for what ranks have to tell, a second at most. How many told what is expected; another answer, or none,
    // is the end.
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

        // Rank 0 has its own limit of time, which may have begun later.
        end_ = deadline_after(2 * invitation_.patience + writing_time);
        const Answer answer = hear(link(0).notices, 0);
        if (answer.what != What::table) throw EndsQuietly();
        std::vector<Place> places(links_.size());
        if (!llmc::receive_all(link(0).notices, std::as_writable_bytes(std::span(places)), end_)) lost(0);
        key_ = hello.key = answer.key;
        for (int rank = 1; rank < invitation_.rank; ++rank) {
            const Place& place = places[static_cast<std::size_t>(rank)];
            Address address{text_of(place.host), static_cast<std::uint16_t>(place.port)};
            // A process beside rank 0: at the address at which this one has found rank 0.
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

    // The connection on which rank 0 has said welcome.
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
                    why = "what listens there does not answer";
                    continue;
                }
                if (answer.mark != answer_mark) {
                    user_error(
                        "another program answers at {}:{}; choose another MASTER_PORT, the same for all "
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
            "MASTER_ADDR and MASTER_PORT (TRAIN_GPT_CONNECT_SECONDS is how long the processes wait)",
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
                    "MASTER_ADDR: cannot find the machine '{}': {}; it is the name or the address of the one "
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
            user_error("rank {} cannot connect to rank {} at {} (port {}): {}; {}", invitation_.rank, rank,
                       address.host, address.port, why, connect_advice);
        }
        return socket;
    }

    void await_higher_ranks() {
        while (!is_whole()) {
            const std::array watched = {link(0).notices.file()};
            std::optional<Arrival> arrival = door_.next(end_, watched);
            if (!arrival) {
                // Rank 0 has nothing to say here but that the job has failed.
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
        user_error("the process with RANK={} ended while the processes of the job were finding each other",
                   rank);
    }

    static constexpr std::string_view connect_advice =
        "the machines of a job must reach each other at any port, so look at their firewalls";

    const Invitation& invitation_;
    std::vector<Link> links_;
    std::vector<std::int32_t> ports_;  // where ranks listen, at rank 0
    std::uint64_t key_ = 0;            // of the job, so that no other comes in
    Deadline end_;
    Door door_;
};

}  // namespace

std::vector<Link> meet(const Invitation& invitation) { return Meeting(invitation).take_place(); }

}  // namespace llmc
