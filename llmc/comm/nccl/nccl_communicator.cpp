#include "llmc/comm/nccl/nccl_communicator.h"

#include <fmt/format.h>
#include <nccl.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/device/cuda/cuda_queues.h"

namespace llmc {

namespace {

using cuda::CudaQueues;

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

class NcclCommunicator final : public Communicator {
  public:
    NcclCommunicator(Communicator& host, CudaQueues& queues, double timeout)
        : host_(host), queues_(queues), timeout_(timeout) {
        join();
        watch_ = queues_.add_watch([this](double waited) { watch(waited); });
    }
    ~NcclCommunicator() override {
        queues_.remove_watch(watch_);
        leave();
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
        auto made = std::make_unique<NcclCommunicator>(*group, queues_, timeout_);
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
        if (rank() == 0) require(ncclGetUniqueId(&id), "ncclGetUniqueId");
        std::array<std::int32_t, sizeof id / sizeof(std::int32_t)> words{};
        std::memcpy(words.data(), &id, sizeof id);
        host_.broadcast({reinterpret_cast<std::byte*>(words.data()), DType::int32, {std::ssize(words)}}, 0);
        std::memcpy(&id, words.data(), sizeof id);
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        const ncclResult_t begun = ncclCommInitRankConfig(&comm_, size(), id, rank(), &config);
        check_call(begun, "ncclCommInitRankConfig");
    }

    // Waits where the call is still being worked on.
    void check_call(ncclResult_t result, const char* call) {
        const auto start = std::chrono::steady_clock::now();
        while (result == ncclInProgress) {
            const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
            if (waited.count() > timeout_) give_up(call, waited.count());
            require(ncclCommGetAsyncError(comm_, &result), "ncclCommGetAsyncError");
            if (result == ncclInProgress) std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
        require(result, call);
    }

    void require(ncclResult_t result, const char* call) const {
        if (result == ncclSuccess) return;
        const char* const detail = ncclGetLastError(comm_);
        const bool known = detail != nullptr && *detail != '\0';
        user_error("{}: NCCL says \"{}\"{}{}; NCCL_DEBUG=INFO tells more", call, ncclGetErrorString(result),
                   known ? ": " : "", known ? detail : "");
    }

    // Without waiting for ranks that may have failed.
    void leave() {
        if (comm_) ncclCommAbort(comm_);
        comm_ = nullptr;
    }

    // The host waits for the GPU, which may be waiting for another rank. What ends the wait also ends the collectives
    // that are under way: memory could not be freed before.
    void watch(double waited) {
        if (!comm_) return;
        try {
            ncclResult_t state = ncclSuccess;
            require(ncclCommGetAsyncError(comm_, &state), "ncclCommGetAsyncError");
            if (state != ncclInProgress) require(state, "a collective under way");
            if (waited > timeout_) give_up("the GPU's work", waited);
        } catch (const UserError&) {
            leave();
            throw;
        }
    }

    [[noreturn]] void give_up(const char* what, double waited) const {
        user_error(
            "rank {} has waited {:.0f} s for {}, in which another process is gone, stuck or too slow; if "
            "they only need more time, give a larger --comm-timeout",
            rank(), waited, what);
    }

    Communicator& host_;
    std::unique_ptr<Communicator> own_host_;  // of a communicator made by split
    CudaQueues& queues_;
    double timeout_;
    ncclComm_t comm_ = nullptr;
    int watch_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, Queues& queues, double timeout,
                                                     bool shares_gpu) {
    if (shares_gpu) let_ranks_share_a_gpu(host.rank());
    auto* const streams = dynamic_cast<CudaQueues*>(&queues);
    check(streams != nullptr, "NCCL works on a CUDA device's queues");
    return std::make_unique<NcclCommunicator>(host, *streams, timeout);
}

}  // namespace llmc
