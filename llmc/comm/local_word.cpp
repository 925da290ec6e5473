#include "llmc/comm/local_word.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <functional>
#include <utility>

#include "llmc/comm/socket.h"

namespace llmc {
namespace {

// On a busy machine processes that were started together come a second apart.
constexpr std::chrono::seconds memory{2};

}  // namespace

LocalWord::LocalWord(std::string_view word) : name_(fmt::format("train_gpt-{}-{}", getppid(), word)) {}

bool LocalWord::claim() {
    // An address of the abstract kind, which begins with a zero and is no file.
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::copy_n(name_.begin(), std::min(name_.size(), sizeof address.sun_path - 1), address.sun_path + 1);
    const auto* name_of_all = reinterpret_cast<const sockaddr*>(&address);
    Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket) return true;
    if (bind(socket.file(), name_of_all, sizeof address) != 0) {
        if (errno != EADDRINUSE) return true;
        // Its holder counts who came; it may have ended since.
        static_cast<void>(connect(socket.file(), name_of_all, sizeof address));
        return false;
    }
    listen(socket.file(), SOMAXCONN);
    socket_ = std::move(socket);
    return true;
}

bool LocalWord::wait_for_another(Deadline end) const {
    pollfd file = {socket_.file(), POLLIN, 0};
    while (::poll(&file, 1, milliseconds_until(end)) <= 0)
        if (std::chrono::steady_clock::now() >= end) return false;
    return static_cast<bool>(Socket(::accept(socket_.file(), nullptr, nullptr)));
}

void say_once_here(const std::string& text, std::optional<int> others) {
    LocalWord word(fmt::format("{:x}", std::hash<std::string>()(text)));
    if (!word.claim()) return;
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
    const Deadline end = std::chrono::steady_clock::now() + memory;
    for (int came = 0; !others || came < *others; ++came)
        if (!word.wait_for_another(end)) break;
}

}  // namespace llmc
