#include "llmc/comm/socket.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "llmc/core/error.h"
#include "llmc/core/text.h"

namespace llmc {
namespace {

// A process has two connections to each of the others. The standard streams, the listener, and the files of a
// run need up to 8 more descriptors; the rest is for libraries.
constexpr std::int64_t connections_to_a_process = 2;
constexpr std::int64_t other_files = 16;

// Whether the call must be repeated later, because nothing can move now.
bool later(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

Moved moved(ssize_t result, bool zero_is_the_end) {
    if (result > 0) return {static_cast<std::size_t>(result), false};
    if (result == 0) return {0, zero_is_the_end};
    return {0, !later(errno)};
}

// Waits until the socket can be read (POLLIN) or written (POLLOUT), for at most a second.
void wait_for(const Socket& socket, short event, Deadline end) {
    pollfd wanted{socket.file(), event, 0};
    ::poll(&wanted, 1, milliseconds_until(end));
}

void set(const Socket& socket, int level, int option, int value) {
    setsockopt(socket.file(), level, option, &value, sizeof value);
}

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// flags: for getaddrinfo.
AddressList look_up(const std::string& host, std::uint16_t port, int flags, std::string& why) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags | AI_NUMERICSERV;
    addrinfo* found = nullptr;
    const int code = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (code != 0) why = code == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(code);
    return {code == 0 ? found : nullptr, &freeaddrinfo};
}

Address address_of(const sockaddr* address, socklen_t length) {
    std::array<char, NI_MAXHOST> host{};
    std::array<char, NI_MAXSERV> port{};
    if (getnameinfo(address, length, host.data(), host.size(), port.data(), port.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
        return {};
    std::string text = host.data();
    // An IPv4 address on an IPv6 socket.
    if (text.starts_with("::ffff:") && text.find('.') != std::string::npos) text.erase(0, 7);
    return {text, static_cast<std::uint16_t>(std::stoi(port.data()))};
}

Address address_of_own(const Socket& socket) {
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    if (getsockname(socket.file(), reinterpret_cast<sockaddr*>(&own), &length) != 0) return {};
    return address_of(reinterpret_cast<sockaddr*>(&own), length);
}

// Turns off Nagle's algorithm, so that small messages are sent at once.
Socket prepared(Socket connection) {
    set(connection, IPPROTO_TCP, TCP_NODELAY, 1);
    return connection;
}

Socket listening(int family, std::uint16_t port) {
    Socket socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket) return socket;
    // Takes the port even if the system still remembers connections of an earlier job.
    set(socket, SOL_SOCKET, SO_REUSEADDR, 1);
    sockaddr_in6 six{};
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(port);
    sockaddr_in four{};
    four.sin_family = AF_INET;
    four.sin_port = htons(port);
    const bool is_six = family == AF_INET6;
    if (is_six) set(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
    const auto* address = is_six ? reinterpret_cast<sockaddr*>(&six) : reinterpret_cast<sockaddr*>(&four);
    if (bind(socket.file(), address, is_six ? sizeof six : sizeof four) != 0 ||
        listen(socket.file(), SOMAXCONN) != 0) {
        const int why = errno;
        socket.close();
        errno = why;
    }
    return socket;
}

}  // namespace

void Socket::close() {
    if (file_ >= 0) ::close(file_);
    file_ = -1;
}

Moved receive_some(const Socket& from, std::span<std::byte> data) {
    return moved(recv(from.file(), data.data(), data.size(), 0), !data.empty());
}

Moved send_some(const Socket& to, std::span<const std::byte> data) {
    return moved(send(to.file(), data.data(), data.size(), MSG_NOSIGNAL), false);
}

bool receive_all(const Socket& from, std::span<std::byte> data, Deadline end) {
    while (!data.empty()) {
        const Moved part = receive_some(from, data);
        if (part.closed) return false;
        data = data.subspan(part.bytes);
        if (part.bytes > 0 || data.empty()) continue;
        if (milliseconds_until(end) == 0) return false;
        wait_for(from, POLLIN, end);
    }
    return true;
}

bool send_all(const Socket& to, std::span<const std::byte> data, Deadline end) {
    while (!data.empty()) {
        const Moved part = send_some(to, data);
        if (part.closed) return false;
        data = data.subspan(part.bytes);
        if (part.bytes > 0 || data.empty()) continue;
        if (milliseconds_until(end) == 0) return false;
        wait_for(to, POLLOUT, end);
    }
    return true;
}

Address address_of_peer(const Socket& socket) {
    sockaddr_storage peer{};
    socklen_t length = sizeof peer;
    if (getpeername(socket.file(), reinterpret_cast<sockaddr*>(&peer), &length) != 0) return {};
    return address_of(reinterpret_cast<sockaddr*>(&peer), length);
}

std::vector<Address> resolve(const std::string& host, std::uint16_t port, std::string& why) {
    const AddressList found = look_up(host, port, 0, why);
    std::vector<Address> addresses;
    for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next)
        addresses.push_back(address_of(one->ai_addr, one->ai_addrlen));
    return addresses;
}

Socket connect_to(const Address& address, Deadline end, std::string& why) {
    const AddressList found = look_up(address.host, address.port, AI_NUMERICHOST, why);
    if (!found) return {};
    Socket socket(::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    int error = 0;
    if (!socket || ::connect(socket.file(), found->ai_addr, found->ai_addrlen) != 0) error = errno;
    while (error == EINPROGRESS || error == EINTR) {
        pollfd wanted{socket.file(), POLLOUT, 0};
        const int ready = ::poll(&wanted, 1, milliseconds_until(end));
        socklen_t length = sizeof error;
        if (ready > 0) {
            getsockopt(socket.file(), SOL_SOCKET, SO_ERROR, &error, &length);
        } else if (milliseconds_until(end) == 0) {
            error = ETIMEDOUT;
        }
    }
    // If no process listens at a port of this machine, the system may give that same port to the connecting
    // socket, which then connects to itself.
    const Address own = error == 0 ? address_of_own(socket) : Address();
    if (error == 0 && own.port == address.port && own.host == address_of_peer(socket).host)
        error = ECONNREFUSED;
    if (error == 0) return prepared(std::move(socket));
    why = std::strerror(error);
    return {};
}

Listener::Listener(std::uint16_t port) : socket_(listening(AF_INET6, port)) {
    if (!socket_ && errno != EADDRINUSE) socket_ = listening(AF_INET, port);  // a machine without IPv6
    if (!socket_) {
        user_error(
            "cannot listen on port {}: {}; another program or another job's RANK=0 uses it; choose another "
            "MASTER_PORT from 1024 to 65535, the same for all processes",
            port, std::strerror(errno));
    }
    port_ = address_of_own(socket_).port;
}

Listener::Listener(Socket socket) : socket_(std::move(socket)) {
    fcntl(socket_.file(), F_SETFD, FD_CLOEXEC);
    port_ = address_of_own(socket_).port;
}

Socket Listener::accept() const {
    Socket connection(accept4(socket_.file(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    return connection ? prepared(std::move(connection)) : Socket();
}

void allow_connections_to_all(int processes) {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    if (limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
        getrlimit(RLIMIT_NOFILE, &limit);
    }
    const std::int64_t needed = connections_to_a_process * (processes - 1) + other_files;
    if (limit.rlim_cur >= static_cast<rlim_t>(needed)) return;
    const auto allowed = static_cast<std::int64_t>(limit.rlim_cur);
    const std::int64_t most = std::max<std::int64_t>(0, allowed - other_files) / connections_to_a_process + 1;
    user_error(
        "each of {} processes needs {} open files, but the hard limit is {} (ulimit -Hn); raise it as root, "
        "or start at most {}",
        processes, needed, allowed, plural(most, "process", "es"));
}

int milliseconds_until(Deadline end) {
    using std::chrono::milliseconds;
    const auto left = std::chrono::ceil<milliseconds>(end - std::chrono::steady_clock::now());
    return static_cast<int>(std::clamp(left, milliseconds(0), milliseconds(1000)).count());
}

}  // namespace llmc
