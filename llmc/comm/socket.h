// TCP sockets over IPv4 and IPv6, with time limits for all waits.
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

// A file descriptor of a socket, or none (-1). All sockets are non-blocking and closed on exec.
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

// The result of a call: the bytes it moved, possibly 0. `closed` means that the other end is gone and no more
// will come.
struct Moved {
    std::size_t bytes = 0;
    bool closed = false;
};
Moved receive_some(const Socket& from, std::span<std::byte> data);
Moved send_some(const Socket& to, std::span<const std::byte> data);
// Moves all of the data. False if the other end is gone or the time is over.
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

// The address of a process: an IPv4 or IPv6 address, as text, and a port.
struct Address {
    std::string host;
    std::uint16_t port = 0;

    bool is_loopback() const { return host.starts_with("127.") || host == "::1"; }
};
// The address of the other end of a connection.
Address address_of_peer(const Socket& socket);

// The addresses of a host name. Empty if there are none: `why` then has the system's message.
std::vector<Address> resolve(const std::string& host, std::uint16_t port, std::string& why);

// Connects to the address. Empty if it fails or is not connected by `end`: `why` then has the system's
// message.
Socket connect_to(const Address& address, Deadline end, std::string& why);

// Listens at a port, on all addresses of this machine; port 0 means any free one. UserError if the port
// cannot be used.
class Listener {
  public:
    explicit Listener(std::uint16_t port);
    // Takes over a socket that listens already.
    explicit Listener(Socket socket);

    std::uint16_t port() const { return port_; }
    const Socket& socket() const { return socket_; }
    // The next connection that has arrived; empty if there is none.
    Socket accept() const;

  private:
    Socket socket_;
    std::uint16_t port_ = 0;
};

// Raises this process's limit of open files to the hard limit. UserError if that is too low for one of so many
// processes that connect to each other.
void allow_connections_to_all(int processes);

// Milliseconds until `end`, for poll(2): from 0, if it has passed, to 1000.
int milliseconds_until(Deadline end);

}  // namespace llmc
