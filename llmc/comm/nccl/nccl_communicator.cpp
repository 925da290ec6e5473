#include "llmc/comm/nccl/nccl_communicator.h"

#include <fmt/format.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/comm/watchdog.h"
#include "llmc/core/error.h"
#include "llmc/device/cuda/cuda_streams.h"

namespace llmc {

namespace {

using cuda::CudaStreams;
using cuda::HostWait;

ncclDataType_t type_of(DType dtype) {
    switch (dtype) {
        case DType::fp32:
            return ncclFloat32;
        case DType::bf16:
            return ncclBfloat16;
        case DType::fp16:
            return ncclFloat16;
        case DType::fp64:
            return ncclFloat64;
        case DType::int32:
            return ncclInt32;
        case DType::uint8:
            return ncclUint8;
    }
    programming_error("a dtype that NCCL has no name for");
}

// Sets NCCL's environment so that several ranks can share one GPU. Each rank appears to be on its own machine
// and uses sockets. NCCL's kernels use few blocks: two kernels that wait for each other deadlock if the GPU
// cannot run both. Variables that are already set stay.
void let_ranks_share_a_gpu(int rank) {
    const std::string host = fmt::format("rank {}", rank);
    for (const auto& [name, value] : {std::pair{"NCCL_HOSTID", host.c_str()},
                                      {"NCCL_NET", "Socket"},
                                      {"NCCL_SOCKET_IFNAME", "lo"},
                                      {"NCCL_P2P_DISABLE", "1"},
                                      {"NCCL_SHM_DISABLE", "1"},
                                      {"NCCL_MAX_CTAS", "2"},
                                      {"NCCL_ALGO", "Ring"},
                                      {"NCCL_PROTO", "Simple"},
                                      {"NCCL_MNNVL_ENABLE", "0"},
                                      {"NCCL_RAS_ENABLE", "0"}})
        setenv(name, value, 0);
}

// A GPU that computes for long between two events of a step looks like one that waits.
constexpr std::string_view advice_on_gpus =
    "if a step takes that long on these GPUs, give a longer --comm-timeout";

// State that the communicators of a process share: the streams, and one watchdog over all of them. Operations
// that the host waits for may be queued behind collectives of several communicators.
class SharedWatch {
  public:
    SharedWatch(HostCommunicator& world, CudaStreams& streams)
        : streams_(streams), watchdog_(world.watchdog()), rank_(world.rank()), size_(world.size()) {
        number_ = streams_.add_watch([this](HostWait wait) { look(wait); });
    }
    ~SharedWatch() { streams_.remove_watch(number_); }
    SharedWatch(const SharedWatch&) = delete;
    SharedWatch& operator=(const SharedWatch&) = delete;

    CudaStreams& streams() { return streams_; }

    void add(ncclComm_t communicator) { communicators_.push_back(communicator); }
    void remove(ncclComm_t communicator) { std::erase(communicators_, communicator); }

    // Waits until the communicator is no longer working on the call.
    void finish_call(ncclComm_t communicator, ncclResult_t result, const char* call) {
        watchdog_.begin(call);
        while (result == ncclInProgress) {
            require(communicator, ncclCommGetAsyncError(communicator, &result), "ncclCommGetAsyncError");
            if (result != ncclInProgress) break;
            watch_others(false);
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
        watchdog_.end();
        require(communicator, result, call);
    }

    // Ends the job unless `result` is ncclSuccess.
    void require(ncclComm_t communicator, ncclResult_t result, const char* call) {
        if (result == ncclSuccess) return;
        const char* const detail = ncclGetLastError(communicator);
        const bool known = detail != nullptr && *detail != '\0';
        watchdog_.fail(fmt::format("{}: NCCL says \"{}\"{}{}; for details, set NCCL_DEBUG=INFO", call,
                                   ncclGetErrorString(result), known ? ": " : "", known ? detail : ""));
    }

  private:
    // Called while the host waits for the GPU, which may itself be waiting for any other rank.
    void look(HostWait wait) {
        if (wait == HostWait::ends) return watchdog_.end();
        if (wait == HostWait::begins) {
            watchdog_.begin("the GPU's work", advice_on_gpus);
            reached_.reset();
        }
        for (const ncclComm_t communicator : communicators_) {
            ncclResult_t state = ncclSuccess;
            require(communicator, ncclCommGetAsyncError(communicator, &state), "ncclCommGetAsyncError");
            if (state != ncclInProgress) require(communicator, state, "a collective in flight");
        }
        watch_others(watchdog_.has_waited_long() && has_moved());
    }

    // Whether the GPU has reached events since the last look.
    bool has_moved() {
        const std::optional<std::ptrdiff_t> before = std::exchange(reached_, streams_.count_reached());
        return before && *before != *reached_;
    }

    void watch_others(bool moved) {
        watchdog_.end_if_lost();
        watchdog_.look(moved, [this] { return others(); });
    }

    std::vector<int> others() const {
        std::vector<int> ranks;
        for (int rank = 0; rank < size_; ++rank)
            if (rank != rank_) ranks.push_back(rank);
        return ranks;
    }

    CudaStreams& streams_;
    Watchdog watchdog_;
    int rank_, size_;                        // this rank in the job, and the job's size
    std::optional<std::ptrdiff_t> reached_;  // events that the GPU has reached, in this wait
    std::vector<ncclComm_t> communicators_;
    int number_ = 0;  // the number of the streams' watch
};

class NcclCommunicator final : public Communicator {
  public:
    NcclCommunicator(Communicator& host, std::shared_ptr<SharedWatch> watch, bool only_sends)
        : host_(host), watch_(std::move(watch)), streams_(watch_->streams()) {
        join(only_sends);
        watch_->add(comm_);
    }
    // Aborts, because an orderly ncclCommDestroy may wait forever for ranks that have failed.
    ~NcclCommunicator() override {
        watch_->remove(comm_);
        ncclCommAbort(comm_);
    }
    NcclCommunicator(const NcclCommunicator&) = delete;
    NcclCommunicator& operator=(const NcclCommunicator&) = delete;

    int rank() const override { return host_.rank(); }
    int size() const override { return host_.size(); }

    void reduce_scatter(const Tensor& recv, const Tensor& send) override {
        check(send.elements() == recv.elements() * size(), "reduce_scatter: send is size times recv");
        check_call(ncclReduceScatter(send.data, recv.data, count_of(recv), type_of(send.dtype), ncclSum,
                                     comm_, streams_.selected()),
                   "ncclReduceScatter");
        count(CallKind::reduce_scatter, others() * recv.bytes());
    }
    void all_gather(const Tensor& recv, const Tensor& send) override {
        check(recv.elements() == send.elements() * size(), "all_gather: recv is size times send");
        check_call(ncclAllGather(send.data, recv.data, count_of(send), type_of(send.dtype), comm_,
                                 streams_.selected()),
                   "ncclAllGather");
        count(CallKind::all_gather, others() * send.bytes());
    }
    void all_reduce(const Tensor& x) override { reduce(x, ncclSum); }
    void maximum(const Tensor& x) override {
        check(x.dtype == DType::int32, "maximum is of int32");
        reduce(x, ncclMax);
    }
    void broadcast(const Tensor& x, int root) override {
        check_call(
            ncclBroadcast(x.data, x.data, count_of(x), type_of(x.dtype), root, comm_, streams_.selected()),
            "ncclBroadcast");
        count(CallKind::broadcast, rank() == root ? others() * x.bytes() : 0);
    }
    void send(const Tensor& x, int to) override {
        check_call(ncclSend(x.data, count_of(x), type_of(x.dtype), to, comm_, streams_.selected()),
                   "ncclSend");
        count(CallKind::send, x.bytes());
    }
    void recv(const Tensor& x, int from) override {
        check_call(ncclRecv(x.data, count_of(x), type_of(x.dtype), from, comm_, streams_.selected()),
                   "ncclRecv");
        count(CallKind::recv, x.bytes());
    }
    int start_send(const Tensor& x, int to) override {
        send(x, to);
        return 0;
    }
    int start_recv(const Tensor& x, int from) override {
        recv(x, from);
        return 0;
    }
    bool is_done(int) override { return true; }
    void group_begin() override { check_call(ncclGroupStart(), "ncclGroupStart"); }
    void group_end() override { check_call(ncclGroupEnd(), "ncclGroupEnd"); }

    void barrier() override {
        streams_.finish_all();
        host_.barrier();
    }

    std::unique_ptr<Communicator> split(int color, int key, bool only_sends) override {
        auto group = host_.split(color, key);
        if (!group) return nullptr;
        auto made = std::make_unique<NcclCommunicator>(*group, watch_, only_sends);
        made->own_host_ = std::move(group);
        return made;
    }

  private:
    void reduce(const Tensor& x, ncclRedOp_t operation) {
        check_call(ncclAllReduce(x.data, x.data, count_of(x), type_of(x.dtype), operation, comm_,
                                 streams_.selected()),
                   "ncclAllReduce");
        count(CallKind::all_reduce, 2 * others() * x.bytes() / static_cast<std::uint64_t>(size()));
    }
    std::uint64_t others() const { return static_cast<std::uint64_t>(size() - 1); }
    static std::size_t count_of(const Tensor& x) { return static_cast<std::size_t>(x.elements()); }

    // Rank 0 creates the id by which all ranks find each other. The call is non-blocking, so that the
    // watchdog can end the wait for a rank that does not come.
    //
    // A receive is posted long before its peer sends, and spins meanwhile. Its blocks, by default up to 32, share their
    // multiprocessors with no other kernel; a stage has four such communicators.
    void join(bool only_sends) {
        ncclUniqueId id{};
        if (rank() == 0) watch_->require(nullptr, ncclGetUniqueId(&id), "ncclGetUniqueId");
        std::array<std::int32_t, sizeof id / sizeof(std::int32_t)> words{};
        std::memcpy(words.data(), &id, sizeof id);
        host_.broadcast({reinterpret_cast<std::byte*>(words.data()), DType::int32, {std::ssize(words)}}, 0);
        std::memcpy(&id, words.data(), sizeof id);
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        if (only_sends) config.maxCTAs = 4;
        const ncclResult_t begun = ncclCommInitRankConfig(&comm_, size(), id, rank(), &config);
        check_call(begun, "ncclCommInitRankConfig");
    }

    void check_call(ncclResult_t result, const char* call) { watch_->finish_call(comm_, result, call); }

    Communicator& host_;
    std::unique_ptr<Communicator> own_host_;  // if split made this communicator
    std::shared_ptr<SharedWatch> watch_;
    CudaStreams& streams_;
    ncclComm_t comm_ = nullptr;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(HostCommunicator& host, Streams& streams,
                                                     bool shares_gpu) {
    if (shares_gpu) let_ranks_share_a_gpu(host.rank());
    auto* const cuda_streams = dynamic_cast<CudaStreams*>(&streams);
    check(cuda_streams != nullptr, "NCCL works on a CUDA device's streams");
    return std::make_unique<NcclCommunicator>(host, std::make_shared<SharedWatch>(host, *cuda_streams),
                                              false);
}

}  // namespace llmc
