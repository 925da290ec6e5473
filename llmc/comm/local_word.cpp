#include "llmc/comm/local_word.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>

#include "llmc/comm/socket.h"

namespace llmc {
namespace {

// On a busy machine processes that were started together come a second apart.
constexpr std::chrono::seconds memory{2};

}  // namespace

void say_once_here(const std::string& text, std::optional<int> others) {
    // A name that the system knows as long as a process holds it (of the abstract kind, which begins with a zero).
    const std::string name = fmt::format("train_gpt-{}-{:x}", getppid(), std::hash<std::string>()(text));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::copy_n(name.begin(), std::min(name.size(), sizeof address.sun_path - 1), address.sun_path + 1);
    const Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto* name_of_all = reinterpret_cast<const sockaddr*>(&address);
    if (socket && bind(socket.file(), name_of_all, sizeof address) != 0) {
        // The one that speaks counts who came; it may have ended since.
        static_cast<void>(connect(socket.file(), name_of_all, sizeof address));
        return;
    }
    if (socket) listen(socket.file(), SOMAXCONN);
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
    const Deadline end = std::chrono::steady_clock::now() + memory;
    for (int came = 0; !others || came < *others;) {
        pollfd file = {socket.file(), POLLIN, 0};
        if (::poll(&file, 1, milliseconds_until(end)) <= 0) break;
        if (const Socket other(::accept(socket.file(), nullptr, nullptr)); other) ++came;
    }
}

}  // namespace llmc
