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
#include "llmc/device/cuda/cuda_queues.h"

namespace llmc {

namespace {

using cuda::CudaQueues;
using cuda::HostWait;

ncclDataType_t type_of(DType dtype) {
    switch (dtype) {
        case DType::fp32:
            return ncclFloat32;
        case DType::bf16:
            return ncclBfloat16;
        case DType::fp64:
            return ncclFloat64;
        case DType::int32:
            return ncclInt32;
    }
    programming_error("a dtype that NCCL has no name for");
}

// NCCL takes ranks for those of machines of their own, which talk by sockets, and whose kernels leave the GPU room
// for each other: two that waited for each other, and could not both run, would wait for ever. What the environment
// says already stays.
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

// A GPU that computes for long between two marks of a step looks like one that waits.
constexpr std::string_view advice_on_gpus =
    "if a step takes that long on these GPUs, give a longer --comm-timeout";

// What the communicators of a process share: the queues, and the watchdog over all of them. Whatever the host waits for
// may be queued behind collectives of several.
class SharedWatch {
  public:
    SharedWatch(HostCommunicator& world, CudaQueues& queues)
        : queues_(queues), watchdog_(world.watchdog()), rank_(world.rank()), size_(world.size()) {
        number_ = queues_.add_watch([this](HostWait wait) { look(wait); });
    }
    ~SharedWatch() { queues_.remove_watch(number_); }
    SharedWatch(const SharedWatch&) = delete;
    SharedWatch& operator=(const SharedWatch&) = delete;

    CudaQueues& queues() { return queues_; }

    void add(ncclComm_t communicator) { communicators_.push_back(communicator); }
    void remove(ncclComm_t communicator) { std::erase(communicators_, communicator); }

    // Until the call of this communicator is no longer being worked on.
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
        watchdog_.fail(fmt::format("{}: NCCL says \"{}\"{}{}; NCCL_DEBUG=INFO tells more", call,
                                   ncclGetErrorString(result), known ? ": " : "", known ? detail : ""));
    }

  private:
    // While the host waits for the GPU, which may be waiting for any other rank.
    void look(HostWait wait) {
        if (wait == HostWait::ends) return watchdog_.end();
        if (wait == HostWait::begins) {
            watchdog_.begin("the GPU's work", advice_on_gpus);
            reached_.reset();
        }
        for (const ncclComm_t communicator : communicators_) {
            ncclResult_t state = ncclSuccess;
            require(communicator, ncclCommGetAsyncError(communicator, &state), "ncclCommGetAsyncError");
            if (state != ncclInProgress) require(communicator, state, "a collective under way");
        }
        watch_others(watchdog_.has_waited_long() && has_moved());
    }

    // Whether the GPU has reached marks since the last time.
    bool has_moved() {
        const std::optional<std::ptrdiff_t> before = std::exchange(reached_, queues_.count_reached());
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

    CudaQueues& queues_;
    Watchdog watchdog_;
    int rank_, size_;                        // of the job
    std::optional<std::ptrdiff_t> reached_;  // marks, in this wait
    std::vector<ncclComm_t> communicators_;
    int number_ = 0;  // of the queues' watch
};

class NcclCommunicator final : public Communicator {
  public:
    NcclCommunicator(Communicator& host, std::shared_ptr<SharedWatch> watch)
        : host_(host), watch_(std::move(watch)), queues_(watch_->queues()) {
        join();
        watch_->add(comm_);
    }
    // Without waiting for ranks that may have failed.
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
                                     comm_, queues_.selected()),
                   "ncclReduceScatter");
        count(CallKind::reduce_scatter, others() * recv.bytes());
    }
    void all_gather(const Tensor& recv, const Tensor& send) override {
        check(recv.elements() == send.elements() * size(), "all_gather: recv is size times send");
        check_call(ncclAllGather(send.data, recv.data, count_of(send), type_of(send.dtype), comm_,
                                 queues_.selected()),
                   "ncclAllGather");
        count(CallKind::all_gather, others() * send.bytes());
    }
    void all_reduce(const Tensor& x) override {
        check_call(
            ncclAllReduce(x.data, x.data, count_of(x), type_of(x.dtype), ncclSum, comm_, queues_.selected()),
            "ncclAllReduce");
        count(CallKind::all_reduce, 2 * others() * x.bytes() / static_cast<std::uint64_t>(size()));
    }
    void broadcast(const Tensor& x, int root) override {
        check_call(
            ncclBroadcast(x.data, x.data, count_of(x), type_of(x.dtype), root, comm_, queues_.selected()),
            "ncclBroadcast");
        count(CallKind::broadcast, rank() == root ? others() * x.bytes() : 0);
    }
    void send(const Tensor& x, int to) override {
        check_call(ncclSend(x.data, count_of(x), type_of(x.dtype), to, comm_, queues_.selected()),
                   "ncclSend");
        count(CallKind::send, x.bytes());
    }
    void recv(const Tensor& x, int from) override {
        check_call(ncclRecv(x.data, count_of(x), type_of(x.dtype), from, comm_, queues_.selected()),
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
        queues_.finish_all();
        host_.barrier();
    }

    std::unique_ptr<Communicator> split(int color, int key) override {
        auto group = host_.split(color, key);
        if (!group) return nullptr;
        auto made = std::make_unique<NcclCommunicator>(*group, watch_);
        made->own_host_ = std::move(group);
        return made;
    }

  private:
    std::uint64_t others() const { return static_cast<std::uint64_t>(size() - 1); }
    static std::size_t count_of(const Tensor& x) { return static_cast<std::size_t>(x.elements()); }

    // Rank 0 makes the name under which all find each other. Non-blocking, so that a rank that does not come ends the
    // wait.
    void join() {
        ncclUniqueId id{};
        if (rank() == 0) watch_->require(nullptr, ncclGetUniqueId(&id), "ncclGetUniqueId");
        std::array<std::int32_t, sizeof id / sizeof(std::int32_t)> words{};
        std::memcpy(words.data(), &id, sizeof id);
        host_.broadcast({reinterpret_cast<std::byte*>(words.data()), DType::int32, {std::ssize(words)}}, 0);
        std::memcpy(&id, words.data(), sizeof id);
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        const ncclResult_t begun = ncclCommInitRankConfig(&comm_, size(), id, rank(), &config);
        check_call(begun, "ncclCommInitRankConfig");
    }

    void check_call(ncclResult_t result, const char* call) { watch_->finish_call(comm_, result, call); }

    Communicator& host_;
    std::unique_ptr<Communicator> own_host_;  // of a communicator made by split
    std::shared_ptr<SharedWatch> watch_;
    CudaQueues& queues_;
    ncclComm_t comm_ = nullptr;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(HostCommunicator& host, Queues& queues,
                                                     bool shares_gpu) {
    if (shares_gpu) let_ranks_share_a_gpu(host.rank());
    auto* const streams = dynamic_cast<CudaQueues*>(&queues);
    check(streams != nullptr, "NCCL works on a CUDA device's queues");
    return std::make_unique<NcclCommunicator>(host, std::make_shared<SharedWatch>(host, *streams));
}

}  // namespace llmc
