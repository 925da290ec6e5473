#include "llmc/comm/notices.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

namespace llmc {

Notices::Notices(int rank, std::vector<Socket> sockets)
    : rank_(rank), sockets_(std::move(sockets)), heard_(sockets_.size()) {}

void Notices::say(Notice notice) {
    for (int rank = 0; rank < size(); ++rank) say(notice, rank);
}

void Notices::say(Notice notice, int rank) {
    const auto byte = static_cast<std::byte>(notice);
    const Socket& to = sockets_[static_cast<std::size_t>(rank)];
    // There are so few notices that the socket always has room.
    if (to) send_some(to, {&byte, 1});
}

bool Notices::somebody_says_why() const {
    return std::ranges::any_of(heard_, [](const Heard& heard) { return heard.failed || heard.ends; });
}

bool Notices::have_all_ended() const {
    for (int rank = 0; rank < size(); ++rank) {
        const Heard& heard = from(rank);
        if (rank != rank_ && !heard.done && !heard.gone && !heard.failed && !heard.ends) return false;
    }
    return true;
}

void Notices::hear(std::chrono::milliseconds limit, int wake, const std::function<bool(int)>& may_report) {
    // A step allocates nothing, whenever the thread that listens wakes.
    static thread_local std::vector<pollfd> files;
    files.clear();
    for (int rank = 0; rank < size(); ++rank) {
        const bool silent = rank == rank_ || from(rank).gone;
        files.push_back({silent ? -1 : sockets_[static_cast<std::size_t>(rank)].file(), POLLIN, 0});
    }
    files.push_back({wake, POLLIN, 0});
    ::poll(files.data(), files.size(), static_cast<int>(limit.count()));
    for (int rank = 0; rank < size(); ++rank)
        if (files[static_cast<std::size_t>(rank)].revents != 0) hear_from(rank, may_report);
}

void Notices::hear_from(int rank, const std::function<bool(int)>& may_report) {
    Heard& heard = heard_[static_cast<std::size_t>(rank)];
    std::array<std::byte, 64> bytes{};
    const Moved part = receive_some(sockets_[static_cast<std::size_t>(rank)], bytes);
    for (std::size_t i = 0; i < part.bytes; ++i) {
        switch (static_cast<Notice>(bytes[i])) {
            case Notice::waits:
                ++heard.long_waits;
                break;
            case Notice::goes_on:
                --heard.long_waits;
                break;
            case Notice::asks:
                say(may_report(rank) ? Notice::granted : Notice::refused, rank);
                break;
            case Notice::granted:
                heard.granted = true;
                break;
            case Notice::refused:
                heard.refused = true;
                break;
            case Notice::failed:
                heard.failed = true;
                break;
            case Notice::ends:
                heard.ends = true;
                break;
            case Notice::done:
                heard.done = true;
                break;
        }
    }
    if (part.closed) heard.gone = true;
    if ((heard.failed || heard.ends || (heard.gone && !heard.done)) && !has_trouble_) {
        trouble_since_ = std::chrono::steady_clock::now();
        has_trouble_ = true;
    }
}

}  // namespace llmc
