#include "simt/runtime/nccl_operation.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "llmc/core/dtype.h"
#include "simt/runtime/memory.h"

namespace simt::runtime {
namespace {

std::string type_name(ncclDataType_t type) {
    switch (type) {
        case ncclInt8:
            return "int8";
        case ncclUint8:
            return "uint8";
        case ncclInt32:
            return "int32";
        case ncclUint32:
            return "uint32";
        case ncclInt64:
            return "int64";
        case ncclUint64:
            return "uint64";
        case ncclFloat32:
            return "float32";
        case ncclFloat64:
            return "float64";
        case ncclBfloat16:
            return "bfloat16";
        case ncclFloat16:
            return "float16";
        default:
            return "elements of type " + std::to_string(type);
    }
}

const char* name_of(Collective kind) {
    switch (kind) {
        case Collective::all_reduce:
            return "ncclAllReduce";
        case Collective::reduce_scatter:
            return "ncclReduceScatter";
        case Collective::all_gather:
            return "ncclAllGather";
        case Collective::broadcast:
            return "ncclBroadcast";
        case Collective::point_to_point:
            return "ncclSend or ncclRecv";
    }
    return "";
}

std::string name_of(const Header& header) {
    return std::string(name_of(header.kind)) + " of " + std::to_string(header.count) + " " +
           type_name(header.type);
}

template <class T>
constexpr bool is_half = std::is_same_v<T, llmc::bfloat16> || std::is_same_v<T, llmc::float16>;

template <class T>
auto widen(T x) {
    if constexpr (is_half<T>) {
        return llmc::to_float(x);
    } else {
        return x;
    }
}

template <class T, class Wide>
T narrow(Wide x) {
    if constexpr (is_half<T>) {
        return llmc::from_float<T>(x);
    } else {
        return static_cast<T>(x);
    }
}

template <class T>
T combine(ncclRedOp_t op, T a, T b) {
    const auto x = widen(a), y = widen(b);
    switch (op) {
        case ncclProd:
            return narrow<T>(x * y);
        case ncclMax:
            return narrow<T>(std::max(x, y));
        case ncclMin:
            return narrow<T>(std::min(x, y));
        default:
            return narrow<T>(x + y);
    }
}

// out[i] = the sum of element i of the ranks' pieces, beginning with the rank after `owner`.
template <class T>
void reduce_part(ncclRedOp_t op, std::byte* out, const std::vector<const std::byte*>& pieces,
                 std::size_t owner, std::size_t count) {
    const auto element = [&](std::size_t rank, std::size_t i) {
        const T x = reinterpret_cast<const T*>(pieces[rank % pieces.size()])[i];
        if (op != ncclAvg) return x;
        // NCCL multiplies by a rounded 1/n before it adds.
        using Wide = decltype(widen(x));
        const T factor = narrow<T>(Wide(1) / static_cast<Wide>(pieces.size()));
        return narrow<T>(widen(x) * widen(factor));
    };
    for (std::size_t i = 0; i < count; ++i) {
        T sum = element(owner + 1, i);
        for (std::size_t step = 2; step <= pieces.size(); ++step)
            sum = combine(op, sum, element(owner + step, i));
        reinterpret_cast<T*>(out)[i] = sum;
    }
}

void reduce(const Call& call, std::byte* out, const std::vector<const std::byte*>& pieces, std::size_t owner,
            std::size_t count) {
    switch (call.type) {
        case ncclFloat32:
            return reduce_part<float>(call.op, out, pieces, owner, count);
        case ncclFloat64:
            return reduce_part<double>(call.op, out, pieces, owner, count);
        case ncclBfloat16:
            return reduce_part<llmc::bfloat16>(call.op, out, pieces, owner, count);
        case ncclFloat16:
            return reduce_part<llmc::float16>(call.op, out, pieces, owner, count);
        case ncclInt32:
            return reduce_part<std::int32_t>(call.op, out, pieces, owner, count);
        case ncclInt64:
            return reduce_part<std::int64_t>(call.op, out, pieces, owner, count);
        default:
            stop("NCCL: no sums of " + type_name(call.type) + " here");
    }
}

}  // namespace

std::size_t bytes_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8:
        case ncclUint8:
            return 1;
        case ncclBfloat16:
        case ncclFloat16:
            return 2;
        case ncclInt32:
        case ncclUint32:
        case ncclFloat32:
            return 4;
        case ncclInt64:
        case ncclUint64:
        case ncclFloat64:
            return 8;
        default:
            return 0;
    }
}

bool adds(ncclDataType_t type) {
    return type == ncclFloat32 || type == ncclFloat64 || type == ncclBfloat16 || type == ncclFloat16 ||
           type == ncclInt32 || type == ncclInt64;
}

std::string name_of(const Call& call) {
    const std::string what = " of " + std::to_string(call.count) + " " + type_name(call.type);
    if (call.kind != Collective::point_to_point) return name_of(call.kind) + what;
    return (call.send ? "ncclSend" : "ncclRecv") + what + (call.send ? " to rank " : " from rank ") +
           std::to_string(call.peer);
}

std::vector<Access> accesses_of(const Call& call, int rank, int size) {
    const std::size_t part = call.count * bytes_of(call.type);
    const std::size_t whole = part * static_cast<std::size_t>(size);
    const std::size_t own = part * static_cast<std::size_t>(rank);
    std::vector<Access> accesses;
    switch (call.kind) {
        case Collective::all_reduce:
            if (call.send != call.recv) accesses.push_back(reads(call.send, part));
            accesses.push_back(writes(call.recv, part));
            break;
        case Collective::reduce_scatter:
            accesses.push_back(reads(call.send, whole));
            accesses.push_back(writes(call.recv, part));
            break;
        case Collective::all_gather:
            if (call.send != call.recv + own) accesses.push_back(reads(call.send, part));
            accesses.push_back(writes(call.recv, whole));
            break;
        case Collective::broadcast:
            if (rank == call.peer && call.send != call.recv) accesses.push_back(reads(call.send, part));
            accesses.push_back(writes(call.recv, part));
            break;
        case Collective::point_to_point:
            accesses.push_back(call.send ? reads(call.send, part) : writes(call.recv, part));
            break;
    }
    return accesses;
}

Operation::Operation(std::vector<Call> calls, int rank, std::vector<std::uint64_t> orders)
    : calls_(std::move(calls)), rank_(rank), orders_(std::move(orders)) {}

Header Operation::header_of(const Call& call, int peer) const {
    const bool sums = call.kind == Collective::all_reduce || call.kind == Collective::reduce_scatter;
    const bool pair = call.kind == Collective::point_to_point;
    return {call.kind,
            call.type,
            sums ? call.op : ncclSum,
            call.kind == Collective::broadcast ? call.peer : 0,
            call.count,
            pair ? 0 : orders_[static_cast<std::size_t>(peer)]};
}

void Operation::send(const Call& call, int peer, const std::byte* data, std::size_t bytes) {
    Header& header = sent_.emplace_back(header_of(call, peer));
    messages_.push_back({peer, false, reinterpret_cast<std::byte*>(&header), sizeof(header)});
    messages_.push_back({peer, false, const_cast<std::byte*>(data), bytes});
}

void Operation::receive(const Call& call, int peer, std::byte* data, std::size_t bytes) {
    Arrival& arrival = arrivals_.emplace_back(&call, peer, Header{}, messages_.size());
    messages_.push_back({peer, true, reinterpret_cast<std::byte*>(&arrival.header), sizeof(Header)});
    messages_.push_back({peer, true, data, bytes});
}

// A receiver whose turn has come says so, and a sender waits for this, as in NCCL, where it writes into the receiver's
// buffers.
void Operation::meet() {
    sent_.reserve(calls_.size());  // messages contain pointers into it
    arrivals_.reserve(calls_.size());
    for (const Call& call : calls_) {
        if (call.kind != Collective::point_to_point) continue;
        Header* header = nullptr;
        if (call.recv) {
            header = &sent_.emplace_back(header_of(call, call.peer));
        } else {
            header = &arrivals_.emplace_back(&call, call.peer, Header{}, messages_.size()).header;
        }
        messages_.push_back({call.peer, !call.recv, reinterpret_cast<std::byte*>(header), sizeof *header});
    }
}

void Operation::begin() {
    messages_.clear();
    sent_.clear();
    arrivals_.clear();
    const std::size_t ranks = orders_.size();
    const std::size_t messages = std::max(ranks, calls_.size());
    sent_.reserve(messages);
    arrivals_.reserve(messages);
    for (const Call& call : calls_) {
        const std::size_t part = call.count * bytes_of(call.type);
        if (call.kind == Collective::point_to_point) {
            call.send ? send(call, call.peer, call.send, part) : receive(call, call.peer, call.recv, part);
            continue;
        }
        const bool sums = call.kind == Collective::all_reduce || call.kind == Collective::reduce_scatter;
        if (sums) arrived_.resize(ranks * part);
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            const int peer = static_cast<int>(rank);
            if (peer == rank_) continue;
            if (call.kind == Collective::broadcast) {
                // The others send only a header, which shows that they are in the same call.
                send(call, peer, call.send, rank_ == call.peer ? part : 0);
                receive(call, peer, call.recv, peer == call.peer ? part : 0);
                continue;
            }
            const bool scatters = call.kind == Collective::reduce_scatter;
            send(call, peer, call.send + (scatters ? rank * part : 0), part);
            receive(call, peer, (sums ? arrived_.data() : call.recv) + rank * part, part);
        }
    }
}

void Operation::check_headers() const {
    for (const Arrival& arrival : arrivals_) {
        const Message& message = messages_[arrival.message];
        const Header& theirs = arrival.header;
        const Header own = header_of(*arrival.call, arrival.peer);
        if (message.done < message.bytes || theirs == own) continue;
        std::string why;
        if (name_of(theirs) != name_of(own)) {
            why = name_of(theirs);
        } else if (theirs.op != own.op) {
            why = "with another operation";
        } else if (theirs.root != own.root) {
            why = "with another root";
        } else {
            why =
                "that it issued in another order: all ranks issue the collectives of all communicators in "
                "one order";
        }
        stop("rank " + std::to_string(rank_) + "'s " + name_of(*arrival.call) + " meets rank " +
             std::to_string(arrival.peer) + "'s " + why);
    }
}

bool Operation::run(const std::vector<Socket>& sockets) {
    if (phase_ == Phase::turn) {
        meet();
        phase_ = Phase::rendezvous;
    }
    Progress progress = exchange(sockets, messages_);
    check_headers();
    if (progress.is_through && phase_ == Phase::rendezvous) {
        begin();
        phase_ = Phase::moving;
        progress = exchange(sockets, messages_);
    }
    // A peer that is gone may have sent a header before. It tells why the peer is gone.
    check_headers();
    if (progress.gone) throw PeerGone(*progress.gone);
    if (progress.is_through) finish();
    return progress.is_through;
}

void Operation::finish() const {
    const std::size_t ranks = orders_.size();
    const auto own = static_cast<std::size_t>(rank_);
    for (const Call& call : calls_) {
        const std::size_t size = bytes_of(call.type), part = call.count * size;
        const auto pieces = [&](const std::byte* of_own, std::size_t offset) {
            std::vector<const std::byte*> all;
            for (std::size_t rank = 0; rank < ranks; ++rank) {
                all.push_back((rank == own ? of_own : arrived_.data() + rank * part) + offset);
            }
            return all;
        };
        switch (call.kind) {
            case Collective::all_reduce: {
                // The last part also takes the remainder of the division.
                const std::size_t length = std::max<std::size_t>(1, call.count / ranks);
                for (std::size_t owner = 0; owner < ranks && owner * length < call.count; ++owner) {
                    const std::size_t first = owner * length;
                    const std::size_t count = owner + 1 == ranks ? call.count - first : length;
                    reduce(call, call.recv + first * size, pieces(call.send, first * size), owner, count);
                }
                break;
            }
            case Collective::reduce_scatter:
                reduce(call, call.recv, pieces(call.send + own * part, 0), own, call.count);
                break;
            case Collective::all_gather:
                std::memmove(call.recv + own * part, call.send, part);
                break;
            case Collective::broadcast:
                if (rank_ == call.peer) std::memmove(call.recv, call.send, part);
                break;
            case Collective::point_to_point:
                break;
        }
    }
}

std::string Operation::waits_for() const {
    std::set<int> peers;
    for (const Message& message : messages_) {
        if (message.done < message.bytes) peers.insert(message.peer);
    }
    std::string ranks;
    for (const int peer : peers) ranks += (ranks.empty() ? "" : ", ") + std::to_string(peer);
    return ranks;
}

}  // namespace simt::runtime
