#include "llmc/comm/host_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>
#include <tuple>
#include <utility>

#include "llmc/comm/exchange.h"
#include "llmc/comm/transport.h"
#include "llmc/comm/tree_sum.h"
#include "llmc/comm/values_of_ranks.h"
#include "llmc/comm/watchdog.h"

namespace llmc {
namespace {

// Sums are computed in blocks: while one block is added, the next one is transferred.
constexpr std::size_t blocks_in_flight = 2;
// Bytes of one rank's piece. Large enough to hide the cost of a message, and small enough that the received
// data is still in cache when it is added.
constexpr std::size_t largest_block = std::size_t{512} << 10;
// Limit of the staging memory, for many ranks.
constexpr std::size_t largest_staging = std::size_t{16} << 20;
constexpr std::size_t block_alignment = 8;
constexpr std::size_t smallest_block = 1024;

constexpr int tags_per_communicator = 8;  // tags reserved for each communicator, at least one per Channel
constexpr int first_tag(int context) { return context * tags_per_communicator; }

std::size_t pieces_received(int size) { return static_cast<std::size_t>(size) - 1; }

std::vector<int> ranks_after(int rank, int size) {
    std::vector<int> ranks;
    for (int step = 1; step < size; ++step) ranks.push_back((rank + step) % size);
    return ranks;
}

bool disjoint(const Tensor& a, const Tensor& b) {
    return a.data + a.bytes() <= b.data || b.data + b.bytes() <= a.data;
}

// out = the sum of the pieces; in int32 the greatest.
void add_pieces(const Tensor& out, std::span<const std::byte* const> pieces) {
    if (out.dtype == DType::int32) {
        auto* const greatest = out.as<std::int32_t>();
        for (std::int64_t i = 0; i < out.elements(); ++i) {
            std::int32_t most = std::numeric_limits<std::int32_t>::min();
            for (const std::byte* piece : pieces)
                most = std::max(most, reinterpret_cast<const std::int32_t*>(piece)[i]);
            greatest[i] = most;
        }
        return;
    }
    const auto add = [&]<class T>(T) {
        tree_sum<T>(out.as<T>(), pieces, static_cast<std::size_t>(out.elements()));
    };
    out.dtype == DType::fp64 ? add(double{}) : with_dtype(out.dtype, add);
}

}  // namespace

struct HostCommunicator::Shared {
    Shared(Transport& carrier, const ExchangeOptions& given)
        : transport(carrier),
          options(given),
          largest_tag(carrier.largest_tag()),
          exchanges{Exchange(carrier, options), Exchange(carrier, options)} {}

    Transport& transport;
    ExchangeOptions options;
    std::vector<std::byte> own_staging;
    std::span<std::byte> staging;
    int next_context = 1;
    int largest_tag;
    // For one call at a time.
    std::array<Exchange, blocks_in_flight> exchanges;
    // Transfers in flight. Finished ones are reused.
    struct Transfer {
        Exchange exchange;
        bool in_flight = false;
    };
    std::vector<std::unique_ptr<Transfer>> transfers;
    std::vector<const std::byte*> addends;

    // The size of a block. It is the same on every rank, because the staging memory is.
    std::size_t block_bytes(int size) const {
        const std::size_t share = staging.size() / (blocks_in_flight * pieces_received(size));
        const std::size_t bytes = std::min(largest_block, share) / block_alignment * block_alignment;
        if (bytes == 0) {
            programming_error(
                fmt::format("{} bytes of staging are too few for {} ranks", staging.size(), size));
        }
        return bytes;
    }
};

HostCommunicator::HostCommunicator(Transport& transport, const ExchangeOptions& options)
    : shared_(std::make_shared<Shared>(transport, options)),
      ranks_(static_cast<std::size_t>(transport.size())),
      rank_(transport.rank()),
      peers_(ranks_after(transport.rank(), transport.size())),
      context_(0) {
    std::iota(ranks_.begin(), ranks_.end(), 0);
    set_staging({});
}

HostCommunicator::HostCommunicator(std::shared_ptr<Shared> shared, std::vector<int> ranks, int rank,
                                   int context)
    : shared_(std::move(shared)),
      ranks_(std::move(ranks)),
      rank_(rank),
      peers_(ranks_after(rank, static_cast<int>(ranks_.size()))),
      context_(context) {
    check(first_tag(context_) + tags_per_communicator <= shared_->largest_tag, "too many communicators");
}

std::size_t HostCommunicator::staging_bytes(int size) {
    check(size > 0, "a group has ranks");
    if (size == 1) return 0;
    const std::size_t share = largest_staging / (blocks_in_flight * pieces_received(size));
    const std::size_t block =
        std::clamp(share / smallest_block * smallest_block, smallest_block, largest_block);
    return blocks_in_flight * pieces_received(size) * block;
}

void HostCommunicator::set_staging(const Tensor& staging) {
    check(reinterpret_cast<std::uintptr_t>(staging.data) % block_alignment == 0, "staging is aligned");
    shared_->own_staging.resize(staging ? 0 : blocks_in_flight * pieces_received(size()) * smallest_block);
    shared_->staging = staging ? std::span(staging.data, staging.bytes()) : shared_->own_staging;
}

void HostCommunicator::set_timeout(Seconds timeout, std::string advice) {
    shared_->options.timeout = timeout;
    shared_->options.advice = std::move(advice);
}

Watchdog HostCommunicator::watchdog() const { return {shared_->transport, shared_->options.timeout}; }

Exchange& HostCommunicator::begin(Channel channel, std::string_view call, std::size_t slot) {
    Exchange& exchange = shared_->exchanges[slot];
    exchange.begin(first_tag(context_) + static_cast<int>(channel), call);
    return exchange;
}

void HostCommunicator::check_collective(std::string_view call) const {
    if (grouping_) programming_error(fmt::format("{} between group_begin and group_end", call));
}

// out = the tree sum over ranks of one piece of each rank. The piece for rank k lies at pieces + k * stride:
// the parts of a reduce_scatter, or the same piece for every rank if stride is 0. `out` may be this rank's
// own piece. Returns the bytes sent.
std::uint64_t HostCommunicator::sum_pieces(Channel channel, const Tensor& out, const std::byte* pieces,
                                           std::size_t stride) {
    const auto piece_for = [&](int rank) { return pieces + static_cast<std::size_t>(rank) * stride; };
    const std::size_t total = out.bytes();
    if (total == 0) return 0;
    if (size() == 1) {
        // In place there is nothing to do, nor to touch: it may be a device's memory.
        if (out.data != piece_for(rank_)) std::memmove(out.data, piece_for(rank_), total);
        return 0;
    }
    const std::string_view call = channel == Channel::all_reduce ? "all_reduce" : "reduce_scatter";
    const std::size_t block = shared_->block_bytes(size());
    const auto arrival = [&](std::size_t slot, int rank) {
        const int index = rank < rank_ ? rank : rank - 1;
        return shared_->staging.data() +
               (slot * pieces_received(size()) + static_cast<std::size_t>(index)) * block;
    };

    const std::array<Exchange*, blocks_in_flight> in_flight = {&begin(channel, call, 0),
                                                               &begin(channel, call, 1)};
    const auto post = [&](std::size_t slot, std::size_t first) {
        const std::size_t bytes = std::min(block, total - first);
        for (const int peer : peers_) in_flight[slot]->recv(world_rank(peer), arrival(slot, peer), bytes);
        for (const int peer : peers_) in_flight[slot]->send(world_rank(peer), piece_for(peer) + first, bytes);
    };
    const auto add = [&](std::size_t slot, std::size_t first) {
        shared_->addends.clear();
        for (int rank = 0; rank < size(); ++rank)
            shared_->addends.push_back(rank == rank_ ? piece_for(rank) + first : arrival(slot, rank));
        const auto element = static_cast<std::int64_t>(size_of(out.dtype));
        const auto bytes = static_cast<std::int64_t>(std::min(block, total - first));
        add_pieces(out.flat(static_cast<std::int64_t>(first) / element, bytes / element), shared_->addends);
    };

    post(0, 0);
    std::size_t slot = 0;
    for (std::size_t first = 0; first < total; first += block, slot = 1 - slot) {
        if (first + block < total) post(1 - slot, first + block);
        in_flight[slot]->wait();
        add(slot, first);
    }
    return in_flight[0]->bytes_sent() + in_flight[1]->bytes_sent();
}

// recv = the ranks' `send` tensors, concatenated. Returns the bytes sent.
std::uint64_t HostCommunicator::gather_parts(Channel channel, const Tensor& recv, const Tensor& send) {
    const std::size_t part = send.bytes();
    const auto part_of = [&](int rank) { return recv.data + static_cast<std::size_t>(rank) * part; };
    if (part == 0) return 0;
    if (send.data != part_of(rank_)) std::memcpy(part_of(rank_), send.data, part);
    Exchange& parts = begin(channel, channel == Channel::all_reduce ? "all_reduce" : "all_gather");
    for (const int peer : peers_) parts.recv(world_rank(peer), part_of(peer), part);
    for (const int peer : peers_) parts.send(world_rank(peer), send.data, part);
    parts.wait();
    return parts.bytes_sent();
}

void HostCommunicator::reduce_scatter(const Tensor& recv, const Tensor& send) {
    check_collective("reduce_scatter");
    check(recv.dtype == send.dtype && recv.dtype != DType::int32, "reduce_scatter adds fp32, bf16 or fp64");
    check(send.elements() == recv.elements() * size(), "reduce_scatter: send is size times recv");
    const std::size_t part = recv.bytes();
    check(recv.data == send.data + static_cast<std::size_t>(rank_) * part || disjoint(recv, send),
          "reduce_scatter: recv is the rank's own part of send, or does not overlap it");
    count(CallKind::reduce_scatter, sum_pieces(Channel::reduce_scatter, recv, send.data, part));
}

void HostCommunicator::all_gather(const Tensor& recv, const Tensor& send) {
    check_collective("all_gather");
    check(recv.dtype == send.dtype, "all_gather keeps the dtype");
    check(recv.elements() == send.elements() * size(), "all_gather: recv is size times send");
    check(send.data == recv.data + static_cast<std::size_t>(rank_) * send.bytes() || disjoint(recv, send),
          "all_gather: send is the rank's own part of recv, or does not overlap it");
    count(CallKind::all_gather, gather_parts(Channel::all_gather, recv, send));
}

void HostCommunicator::all_reduce(const Tensor& x) {
    check(x.dtype != DType::int32, "all_reduce adds fp32, bf16 or fp64");
    reduce(x);
}

void HostCommunicator::maximum(const Tensor& x) {
    check(x.dtype == DType::int32, "maximum is of int32");
    reduce(x);
}

void HostCommunicator::reduce(const Tensor& x) {
    check_collective("all_reduce");
    const std::int64_t part = x.elements() / size();
    const Tensor own = x.flat(rank_ * part, part);
    const Tensor rest = x.flat(size() * part, x.elements() - size() * part);
    std::uint64_t sent = sum_pieces(Channel::all_reduce, own, x.data, own.bytes());
    sent += gather_parts(Channel::all_reduce, x.flat(0, size() * part), own);
    sent += sum_pieces(Channel::all_reduce, rest, rest.data, 0);
    count(CallKind::all_reduce, sent);
}

void HostCommunicator::broadcast(const Tensor& x, int root) {
    check_collective("broadcast");
    check(root >= 0 && root < size(), "broadcast: the root is in the group");
    Exchange& copies = begin(Channel::broadcast, "broadcast");
    if (x.bytes() > 0 && rank_ != root) copies.recv(world_rank(root), x.data, x.bytes());
    if (x.bytes() > 0 && rank_ == root)
        for (const int peer : peers_) copies.send(world_rank(peer), x.data, x.bytes());
    copies.wait();
    count(CallKind::broadcast, copies.bytes_sent());
}

void HostCommunicator::send(const Tensor& x, int to) { point_to_point(CallKind::send, x, to); }

void HostCommunicator::recv(const Tensor& x, int from) { point_to_point(CallKind::recv, x, from); }

void HostCommunicator::point_to_point(CallKind kind, const Tensor& x, int peer) {
    check_peer(peer);
    const bool alone = !grouping_;
    if (alone) group_begin();
    group_.push_back({kind, x, peer});
    if (alone) group_end();
}

void HostCommunicator::group_begin() {
    check_collective("group_begin");
    group_.clear();
    grouping_ = true;
}

void HostCommunicator::group_end() {
    check(grouping_, "group_end without group_begin");
    grouping_ = false;
    Exchange& messages = begin(Channel::point_to_point,
                               group_.size() == 1 ? name_of(group_[0].kind) : "a group of send and recv");
    for (const Deferred& call : group_) {
        const Tensor& x = call.x;
        if (x.bytes() == 0) continue;
        if (call.kind == CallKind::recv) messages.recv(world_rank(call.peer), x.data, x.bytes());
        if (call.kind == CallKind::send) messages.send(world_rank(call.peer), x.data, x.bytes());
    }
    messages.wait();
    for (const Deferred& call : group_) count(call.kind, call.x.bytes());
}

void HostCommunicator::check_peer(int peer) const {
    check(peer >= 0 && peer < size() && peer != rank_, "the peer is another rank of the group");
}

int HostCommunicator::start_transfer(CallKind kind, const Tensor& x, int peer) {
    check_collective(name_of(kind));
    check_peer(peer);
    auto& transfers = shared_->transfers;
    auto free = std::ranges::find_if(transfers, [](const auto& transfer) { return !transfer->in_flight; });
    if (free == transfers.end()) {
        transfers.push_back(std::make_unique<Shared::Transfer>(
            Shared::Transfer{Exchange(shared_->transport, shared_->options)}));
        free = transfers.end() - 1;
    }
    (*free)->in_flight = true;
    Exchange& exchange = (*free)->exchange;
    exchange.begin(first_tag(context_) + static_cast<int>(Channel::transfer), name_of(kind));
    if (kind == CallKind::send) exchange.send(world_rank(peer), x.data, x.bytes());
    if (kind == CallKind::recv) exchange.recv(world_rank(peer), x.data, x.bytes());
    count(kind, x.bytes());
    return static_cast<int>(free - transfers.begin());
}

int HostCommunicator::start_send(const Tensor& x, int to) { return start_transfer(CallKind::send, x, to); }

int HostCommunicator::start_recv(const Tensor& x, int from) {
    return start_transfer(CallKind::recv, x, from);
}

bool HostCommunicator::is_done(int transfer) {
    Shared::Transfer& asked = *shared_->transfers[static_cast<std::size_t>(transfer)];
    check(asked.in_flight, "is_done() is not called again after it returned true");
    asked.in_flight = !asked.exchange.is_done();
    return !asked.in_flight;
}

void HostCommunicator::barrier() {
    check_collective("barrier");
    Exchange& signals = begin(Channel::barrier, "barrier");
    for (const int peer : peers_) signals.recv(world_rank(peer), nullptr, 0);
    for (const int peer : peers_) signals.send(world_rank(peer), nullptr, 0);
    signals.wait();
}

std::unique_ptr<Communicator> HostCommunicator::split(int color, int key, bool /*only_sends*/) {
    check_collective("split");
    struct Choice {
        std::int32_t color, key, next_context;
    };
    const std::vector<Choice> choices = values_of_ranks(*this, Choice{color, key, shared_->next_context});

    // A number that no rank of this group has used. Groups of different colors may share it,
    // because they have no rank in common.
    int context = 0;
    std::vector<std::tuple<int, int>> members;  // key, rank
    for (int rank = 0; rank < size(); ++rank) {
        const Choice& choice = choices[static_cast<std::size_t>(rank)];
        context = std::max(context, choice.next_context);
        if (choice.color == color && color >= 0) members.emplace_back(choice.key, rank);
    }
    shared_->next_context = context + 1;
    if (members.empty()) return nullptr;
    std::ranges::sort(members);

    std::vector<int> ranks;
    int new_rank = 0;
    for (const auto& [_, rank] : members) {
        if (rank == rank_) new_rank = static_cast<int>(ranks.size());
        ranks.push_back(world_rank(rank));
    }
    return std::unique_ptr<Communicator>(new HostCommunicator(shared_, std::move(ranks), new_rank, context));
}

}  // namespace llmc
