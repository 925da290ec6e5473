#include "llmc/comm/machine_lock.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <functional>
#include <utility>

#include "llmc/comm/socket.h"
#include "llmc/core/standard_streams.h"

namespace llmc {
namespace {

// How long the holder keeps the lock. On a busy machine, processes that were started together may get here
// a second apart.
constexpr std::chrono::seconds hold_time{2};

}  // namespace

MachineLock::MachineLock(std::string_view lock) : name_(fmt::format("train_gpt-{}-{}", getppid(), lock)) {}

bool MachineLock::claim() {
    // An address in Linux's abstract namespace: it begins with a zero byte and is no file.
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::copy_n(name_.begin(), std::min(name_.size(), sizeof address.sun_path - 1), address.sun_path + 1);
    const auto* any_address = reinterpret_cast<const sockaddr*>(&address);
    Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket) return true;
    if (bind(socket.file(), any_address, sizeof address) != 0) {
        if (errno != EADDRINUSE) return true;
        // The holder counts these connections. It may have ended since bind().
        static_cast<void>(connect(socket.file(), any_address, sizeof address));
        return false;
    }
    listen(socket.file(), SOMAXCONN);
    socket_ = std::move(socket);
    return true;
}

bool MachineLock::wait_for_another(Deadline end) const {
    pollfd file = {socket_.file(), POLLIN, 0};
    while (::poll(&file, 1, milliseconds_until(end)) <= 0)
        if (std::chrono::steady_clock::now() >= end) return false;
    return static_cast<bool>(Socket(::accept(socket_.file(), nullptr, nullptr)));
}

void print_once_per_machine(const std::string& text, std::optional<int> others) {
    MachineLock lock(fmt::format("{:x}", std::hash<std::string>()(text)));
    if (!lock.claim()) return;
    write_error(text);
    const Deadline end = std::chrono::steady_clock::now() + hold_time;
    for (int came = 0; !others || came < *others; ++came)
        if (!lock.wait_for_another(end)) break;
}

}  // namespace llmc
