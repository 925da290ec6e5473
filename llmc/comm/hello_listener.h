// The messages by which processes without MPI find one another (rendezvous.h), and the listener that receives the
// first of them, the hello.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "llmc/comm/socket.h"

// The names here are short; only the rendezvous uses them.
namespace llmc::rendezvous {

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
inline const Mark hello_mark = letters<8>("llmc-me?");
inline const Mark answer_mark = letters<8>("llmc-yes");

enum class Channel : std::int32_t { notices, messages };

// The first message on a connection. Its mark, its length and the position of the version are the same in all
// versions of the program.
struct Hello {
    Mark mark = hello_mark;
    std::array<char, 120> version{};
    // Identifies the job. It is 0 in a hello to rank 0, since the sender does not know it yet.
    std::uint64_t key = 0;
    std::int32_t rank = 0;
    std::int32_t size = 0;
    Channel channel = Channel::notices;
    std::int32_t port = 0;  // the port at which the sender itself listens
    std::array<char, 104> reserved{};
};
static_assert(sizeof(Hello) == 256 && std::is_trivially_copyable_v<Hello>);

// Messages between rank 0 and the others, on the connection for notices.
struct Answer {
    enum class What : std::int32_t {
        welcome,  // the first answer
        table,    // all ranks have come; an Endpoint for each rank follows
        ready,    // from a rank: it has all its links
        go,       // all ranks are ready
        ended     // the job has failed, and another process says why
    };
    Mark mark = answer_mark;
    What what = What::welcome;
    std::int32_t reserved = 0;
    std::uint64_t key = 0;
};
static_assert(sizeof(Answer) == 24 && std::is_trivially_copyable_v<Answer>);

struct Endpoint {
    std::array<char, 60> host{};
    std::int32_t port = 0;
};
static_assert(sizeof(Endpoint) == 64);

struct Arrival {
    Hello hello;
    Socket socket;
};

// A listener, and the connections whose hello is not whole yet.
class HelloListener {
  public:
    explicit HelloListener(Listener listener) : listener_(std::move(listener)) {}

    std::uint16_t port() const { return listener_.port(); }

    // The next connection whose hello is whole. None if the time is over, or once one of the files `watched`
    // can be read.
    std::optional<Arrival> next(Deadline end, std::span<const int> watched);

  private:
    struct Stranger {
        Socket socket;
        Hello hello;
        std::size_t heard = 0;
    };

    // Reads more of the hello. Returns whether the connection may still belong to the job.
    static bool listen_to(Stranger& stranger);

    Listener listener_;
    std::vector<Stranger> strangers_;
};

}  // namespace llmc::rendezvous
