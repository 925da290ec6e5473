// TCP sockets, over IPv4 and IPv6, with limits of time in the place of waiting for ever.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmc {

using Deadline = std::chrono::steady_clock::time_point;

// A file descriptor of a socket, or none (-1). All are non-blocking and closed on exec.
class Socket {
  public:
    Socket() = default;
    explicit Socket(int file) : file_(file) {}
    ~Socket() { close(); }
    Socket(Socket&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
    Socket& operator=(Socket&& other) noexcept {
        if (this != &other) {
            close();
            file_ = std::exchange(other.file_, -1);
        }
        return *this;
    }

    int file() const { return file_; }
    explicit operator bool() const { return file_ >= 0; }
    void close();

  private:
    int file_ = -1;
};

// What a call moved: bytes, possibly none for now; `closed` where the other end is gone and nothing more will come.
struct Moved {
    std::size_t bytes = 0;
    bool closed = false;
};
Moved receive_some(const Socket& from, std::span<std::byte> data);
Moved send_some(const Socket& to, std::span<const std::byte> data);
// All of the data. False where the other end is gone or the time is over.
bool receive_all(const Socket& from, std::span<std::byte> data, Deadline end);
bool send_all(const Socket& to, std::span<const std::byte> data, Deadline end);

template <class T>
std::span<std::byte> bytes_of(T& value) {
    return std::as_writable_bytes(std::span<T, 1>(&value, 1));
}
template <class T>
std::span<const std::byte> bytes_of(const T& value) {
    return std::as_bytes(std::span<const T, 1>(&value, 1));
}

// Where a process can be reached: a number of IPv4 or IPv6, as text.
struct Address {
    std::string host;
    std::uint16_t port = 0;

    bool is_loopback() const { return host.starts_with("127.") || host == "::1"; }
};
// Of the other end of a connection.
Address address_of_peer(const Socket& socket);

// The addresses of a name. Empty where there are none: `why` then says so in the system's words.
std::vector<Address> resolve(const std::string& host, std::uint16_t port, std::string& why);

// A connection to the address. None where there was no answer until then: `why` says so in the system's words.
Socket connect_to(const Address& address, Deadline end, std::string& why);

// Connections to a port of this machine, at all of its addresses; port 0 is one that is free. A UserError where the
// port cannot be had.
class Listener {
  public:
    explicit Listener(std::uint16_t port);

    std::uint16_t port() const { return port_; }
    const Socket& socket() const { return socket_; }
    // The next one that has come; none where none has.
    Socket accept() const;

  private:
    Socket socket_;
    std::uint16_t port_ = 0;
};

// Milliseconds until then for poll(2): 0 where it is over, and a second at most.
int milliseconds_until(Deadline end);

}  // namespace llmc
