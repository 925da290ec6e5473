#include "simt/runtime/nccl_mesh.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

#include "simt/runtime/memory.h"

namespace simt::runtime {
namespace {

// An address in Linux's abstract namespace, where no file remains.
struct Address {
    sockaddr_un address{};
    socklen_t bytes;

    Address(const std::string& id, int rank) {
        const std::string name = "simt-nccl-" + id + "-" + std::to_string(rank);
        address.sun_family = AF_UNIX;
        name.copy(address.sun_path + 1, sizeof(address.sun_path) - 1);
        bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    }
    sockaddr* get() { return reinterpret_cast<sockaddr*>(&address); }
};

Socket make_socket() { return Socket(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)); }

bool has_hello(const Socket& socket, Hello* hello) {
    return socket.read(hello, sizeof(*hello), true) == sizeof(*hello);
}

}  // namespace

Socket::~Socket() {
    if (descriptor_ >= 0) close(descriptor_);
}

Socket::Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}

Socket& Socket::operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
}

// A system call does not open closed memory, as an access does. Nothing was sent or received then.
std::ptrdiff_t Socket::write(const void* from, std::size_t bytes) const {
    const auto send_now = [&] { return send(descriptor_, from, bytes, MSG_NOSIGNAL | MSG_DONTWAIT); };
    ssize_t written = send_now();
    if (written < 0 && errno == EFAULT) {
        (void)*static_cast<const volatile char*>(from);
        written = send_now();
    }
    if (written >= 0) return written;
    return errno == EAGAIN || errno == EINTR ? 0 : gone;
}

std::ptrdiff_t Socket::read(void* to, std::size_t bytes, bool peek) const {
    const auto receive_now = [&] {
        return recv(descriptor_, to, bytes, MSG_DONTWAIT | (peek ? MSG_PEEK : 0));
    };
    ssize_t count = receive_now();
    if (count < 0 && errno == EFAULT) {
        *static_cast<volatile char*>(to) = 0;
        count = receive_now();
    }
    if (count > 0) return count;
    return count < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : gone;
}

Mesh::Mesh(std::string id, const Hello& own, int size)
    : hellos(static_cast<std::size_t>(size)),
      sockets(static_cast<std::size_t>(size)),
      id_(std::move(id)),
      own_(own),
      listener_(make_socket()),
      called_(static_cast<std::size_t>(own.rank)) {
    hellos[static_cast<std::size_t>(own.rank)] = own;
    Address address(id_, own.rank);
    if (bind(listener_.descriptor(), address.get(), address.bytes) != 0 ||
        listen(listener_.descriptor(), size) != 0) {
        stop("NCCL: two processes have rank " + std::to_string(own.rank) + ", or no socket is left");
    }
}

// Each rank connects to those before it, and accepts connections from those after it.
bool Mesh::connect() {
    const auto greet = [this](const Socket& socket) {
        return socket.write(&own_, sizeof(own_)) == sizeof(own_);
    };
    const auto meet = [this](Socket& socket) {
        Hello hello{};
        if (!socket || !has_hello(socket, &hello)) return;
        socket.read(&hello, sizeof(hello));
        const auto rank = static_cast<std::size_t>(hello.rank);
        if (rank >= sockets.size()) stop("NCCL: a rank beyond the number of ranks");
        hellos[rank] = hello;
        sockets[rank] = std::move(socket);
    };
    for (int rank = 0; rank < own_.rank; ++rank) {
        Socket& socket = called_[static_cast<std::size_t>(rank)];
        if (sockets[static_cast<std::size_t>(rank)]) continue;
        if (!socket) {
            Socket caller = make_socket();
            Address address(id_, rank);
            if (::connect(caller.descriptor(), address.get(), address.bytes) == 0 && greet(caller)) {
                socket = std::move(caller);
            }
        }
        meet(socket);
    }
    for (;;) {
        Socket answered(accept4(listener_.descriptor(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (!answered) break;
        if (greet(answered)) answered_.push_back(std::move(answered));
    }
    for (Socket& socket : answered_) meet(socket);
    return missing().empty();
}

std::string Mesh::missing() const {
    std::string ranks;
    for (std::size_t rank = 0; rank < sockets.size(); ++rank) {
        if (sockets[rank] || rank == static_cast<std::size_t>(own_.rank)) continue;
        ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    }
    return ranks;
}

Progress exchange(const std::vector<Socket>& sockets, std::vector<Message>& messages) {
    Progress progress;
    std::set<std::pair<int, bool>> held_up;  // peers and directions
    for (Message& message : messages) {
        const auto direction = std::pair(message.peer, message.receives);
        const Socket& socket = sockets.at(static_cast<std::size_t>(message.peer));
        while (message.done < message.bytes && !held_up.contains(direction)) {
            std::byte* const at = message.data + message.done;
            const std::size_t left = message.bytes - message.done;
            const std::ptrdiff_t moved = message.receives ? socket.read(at, left) : socket.write(at, left);
            if (moved == Socket::gone) progress.gone = message.peer;
            if (moved == Socket::gone || moved == 0) {
                held_up.insert(direction);
                continue;
            }
            message.done += static_cast<std::size_t>(moved);
        }
        progress.is_through = progress.is_through && message.done == message.bytes;
    }
    return progress;
}

}  // namespace simt::runtime
