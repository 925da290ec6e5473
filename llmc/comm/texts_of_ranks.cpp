#include "llmc/comm/texts_of_ranks.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "llmc/comm/values_of_ranks.h"
#include "llmc/core/error.h"

namespace llmc {

std::string broadcast_text(Communicator& ranks, std::string own, int root) {
    if (ranks.size() == 1) return own;
    auto bytes = static_cast<std::int64_t>(own.size());
    ranks.broadcast({reinterpret_cast<std::byte*>(&bytes), DType::uint8, {sizeof(bytes)}}, root);
    own.resize(static_cast<std::size_t>(bytes));
    ranks.broadcast({reinterpret_cast<std::byte*>(own.data()), DType::uint8, {bytes}}, root);
    return own;
}

void together(Communicator& ranks, const std::function<void()>& f) {
    if (ranks.size() == 1) return f();
    std::string fault;
    bool fails = false;
    try {
        f();
    } catch (const UserError& error) {
        fault = error.what();
        fails = true;
    }
    const std::vector<std::int32_t> failing = values_of_ranks(ranks, std::int32_t{fails});
    const auto first = std::ranges::find(failing, 1);
    if (first != failing.end())
        throw SharedError(broadcast_text(ranks, fault, static_cast<int>(first - failing.begin())));
}

std::string text_of_root(Communicator& ranks, const std::function<std::string()>& f) {
    std::string text;
    together(ranks, [&] {
        if (ranks.rank() == 0) text = f();
    });
    return broadcast_text(ranks, std::move(text), 0);
}

}  // namespace llmc
