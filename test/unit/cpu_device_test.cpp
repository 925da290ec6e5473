// The CPU as a device: memory, threads, workspace. Results do not depend on the number of threads.
#include "llmc/device/cpu/cpu_device.h"

#include <cstdlib>
#include <thread>

#include "llmc/core/memory_layout.h"
#include "llmc/device/heads.h"
#include "test/unit/cpu_test_support.h"

namespace llmc::cpu_test {

namespace {

TEST(CpuDevice, MemoryIsZeroAndAligned) {
    const auto device = make_cpu_device(2);
    EXPECT_EQ(device->kind(), DeviceKind::cpu);
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{1000}, std::size_t{5'000'000}}) {
        std::byte* const memory = device->allocate(bytes, "activations");
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % buffer_alignment, 0U);
        for (std::size_t i = 0; i < bytes; ++i) ASSERT_EQ(memory[i], std::byte{0});
        std::memset(memory, 1, bytes);
        device->release(memory);
    }
    EXPECT_EQ(device->allocate(0, "nothing"), nullptr);
    device->release(nullptr);
}

TEST(CpuDevice, OnlyItsOwnMemoryIsReleasedAndOnce) {
    const auto device = make_cpu_device(1);
    std::byte foreign{};
    EXPECT_THROW(device->release(&foreign), ProgrammingError);
    std::byte* const memory = device->allocate(10, "activations");
    device->release(memory);
    EXPECT_THROW(device->release(memory), ProgrammingError);
}

TEST(CpuDevice, TooLittleMemoryIsSaidWithArenaAndBytes) {
    const auto device = make_cpu_device(1);
    for (const std::size_t bytes : {std::size_t{1} << 46, std::size_t{1} << 62}) {
        try {
            device->allocate(bytes, "activations");
            FAIL() << "no machine has this much memory";
        } catch (const UserError& error) {
            const std::string line = error.what();
            EXPECT_NE(line.find("activations"), std::string::npos) << line;
            EXPECT_NE(line.find("GiB"), std::string::npos) << line;
            EXPECT_NE(line.find("--micro-batch-size"), std::string::npos) << line;
            EXPECT_NE(line.find("available"), std::string::npos) << line;
            EXPECT_EQ(line.find('\n'), std::string::npos) << line;
        }
    }
}

TEST(CpuDevice, CopiesBothWays) {
    const auto device = make_cpu_device(1);
    std::vector<float> host = {1.0F, 2.0F, 3.0F};
    const Tensor tensor{device->allocate(12, "test"), DType::fp32, {3}};
    device->upload(tensor, host.data());
    std::vector<float> back(3);
    device->synchronize();
    device->download(back.data(), tensor);
    EXPECT_EQ(back, host);
    device->release(tensor.data);
}

TEST(CpuDevice, SaysProcessorAndThreads) {
    EXPECT_NE(make_cpu_device(3)->description().find(", 3 threads"), std::string::npos);
    const std::string one = make_cpu_device(1)->description();
    EXPECT_TRUE(one.ends_with(", 1 thread")) << one;
    EXPECT_GT(one.size(), std::string(", 1 thread").size());
}

TEST(CpuDevice, SaysWhereBf16IsNotTheProcessorsOwn) {
    const auto device = make_cpu_device(1);
    EXPECT_EQ(device->note(DType::fp32), "");
    EXPECT_EQ(device->note(DType::bf16).empty(), cpu::processor_has_bf16());
}

TEST(CpuDevice, ThreadsAreAtMostTheProcessors) {
    if (std::getenv("OMP_NUM_THREADS") != nullptr) GTEST_SKIP() << "OMP_NUM_THREADS is set";
    EXPECT_GE(cpu::default_threads(), 1);
    EXPECT_LE(cpu::default_threads(), static_cast<int>(std::thread::hardware_concurrency()));
    EXPECT_THROW(make_cpu_device(-1), ProgrammingError);
}

// ---- workspace

const WorkspaceRequest request = {2, 70, 48, 3, 200, 50, DType::bf16};

// Calls every operation that needs workspace, at the sizes of the request.
void use_all_of_the_workspace(cpu::CpuOps& ops, DType X) {
    const auto& r = request;
    const std::int64_t N = r.batch * r.sequence;
    const std::int64_t C = r.channels;
    const Shape head = {r.batch, r.sequence, r.heads, C / r.heads};
    const OwnedTensor rows = normal(X, {N, C}, "rows");
    const OwnedTensor wide = normal(X, {N, r.largest_matmul_channels}, "wide");
    const OwnedTensor weight = normal(X, {r.largest_matmul_channels, C}, "weight");
    const OwnedTensor gamma = normal(X, {C}, "gamma");
    const OwnedTensor statistics = normal(DType::fp32, {N}, "statistics");
    const OwnedTensor qkv = normal(X, {r.batch, r.sequence, 3, r.heads, C / r.heads}, "qkv");
    OwnedTensor din(X, {N, C}), dgamma(DType::fp32, {C}), dbeta(DType::fp32, {C}),
        out(X, {N, r.largest_matmul_channels});
    OwnedTensor dweight(DType::fp32, {r.largest_matmul_channels, C});
    OwnedTensor dbias(DType::fp32, {r.largest_matmul_channels});
    OwnedTensor attended(X, head), lse(DType::fp32, {r.batch, r.heads, r.sequence}), dqkv = copy(qkv);
    ops.run(LayerNormBackward{din, dgamma, dbeta, rows, rows, gamma, statistics, statistics});
    ops.run(MatmulForward{out, rows, weight, {}});
    ops.run(MatmulBackward{din, dweight, dbias, wide, rows, weight, rows});
    const auto [q, k, v] = packed_heads(qkv);
    const auto [dq, dk, dv] = packed_heads(dqkv);
    ops.run(AttentionForward{attended, lse, q, k, v});
    ops.run(AttentionBackward{dq, dk, dv, attended, q, k, v, attended, lse});
}

class CpuWorkspace : public testing::TestWithParam<Arithmetic> {};

TEST_P(CpuWorkspace, IsEnoughAndNoMoreThanNeeded) {
    cpu::CpuOps ops(2, GetParam().native_bf16);
    WorkspaceRequest sizes = request;
    sizes.dtype = GetParam().dtype;
    const auto bytes = static_cast<std::int64_t>(ops.workspace_bytes(sizes));
    EXPECT_EQ(ops.workspace_bytes(sizes), cpu::CpuOps(2, true).workspace_bytes(sizes)) << "a pure function";
    const OwnedTensor workspace(DType::bf16, {bytes / 2});
    ops.set_workspace(workspace);
    EXPECT_NO_THROW(use_all_of_the_workspace(ops, sizes.dtype));
    ops.set_workspace(workspace->slice(0, bytes / 2 - 1));
    EXPECT_THROW(use_all_of_the_workspace(ops, sizes.dtype), ProgrammingError);
}

TEST_P(CpuWorkspace, TooLittleIsRefusedByEveryOperationThatNeedsIt) {
    const DType X = GetParam().dtype;
    cpu::CpuOps ops(2, GetParam().native_bf16);
    const OwnedTensor rows = normal(X, {32, 16}, "rows");
    const OwnedTensor weight = normal(X, {16, 16}, "weight");
    const OwnedTensor statistics = normal(DType::fp32, {32}, "statistics");
    const OwnedTensor qkv = normal(X, {1, 32, 3, 1, 16}, "qkv");
    OwnedTensor din(X, {32, 16}), d1(DType::fp32, {16}), d2(DType::fp32, {16});
    OwnedTensor attended(X, {1, 32, 1, 16}), lse(DType::fp32, {1, 1, 32}), dqkv = copy(qkv);
    const OwnedTensor gamma = normal(X, {16}, "gamma");
    const OwnedTensor little(DType::fp32, {10});
    const auto [q, k, v] = packed_heads(qkv);
    const auto [dq, dk, dv] = packed_heads(dqkv);
    for (const Tensor& workspace : {Tensor{}, *little}) {
        ops.set_workspace(workspace);
        EXPECT_THROW(ops.run(LayerNormBackward{din, d1, d2, rows, rows, gamma, statistics, statistics}),
                     ProgrammingError);
        EXPECT_THROW(ops.run(MatmulBackward{{}, {}, d1, rows, rows, weight}), ProgrammingError);
        EXPECT_THROW(ops.run(AttentionForward{attended, lse, q, k, v}), ProgrammingError);
        EXPECT_THROW(ops.run(AttentionBackward{dq, dk, dv, attended, q, k, v, attended, lse}),
                     ProgrammingError);
        if (X == DType::bf16 && !GetParam().native_bf16) {
            EXPECT_THROW(ops.run(MatmulForward{din, rows, weight, {}}), ProgrammingError);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Arithmetics, CpuWorkspace, testing::ValuesIn(arithmetics()),
                         [](const auto& param) { return param.param.name(); });

}  // namespace

}  // namespace llmc::cpu_test
