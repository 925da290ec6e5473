#include "llmc/comm/hello_listener.h"

#include <poll.h>

#include <chrono>
#include <thread>

namespace llmc::rendezvous {

std::optional<Arrival> HelloListener::next(Deadline end, std::span<const int> watched) {
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
            // The peer has gone again, or too many files are open.
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
        if (milliseconds_until(end) == 0) return std::nullopt;
    }
}

bool HelloListener::listen_to(Stranger& stranger) {
    const std::span<std::byte> whole = bytes_of(stranger.hello);
    const Moved part = receive_some(stranger.socket, whole.subspan(stranger.heard));
    stranger.heard += part.bytes;
    if (part.closed && stranger.heard < whole.size()) return false;
    const std::size_t mark_bytes = std::min(stranger.heard, sizeof(Mark));
    return std::memcmp(&stranger.hello, &hello_mark, mark_bytes) == 0;
}

}  // namespace llmc::rendezvous
