// Attention's backward kernels against the CPU device.
#include "llmc/device/cuda/attention_backward.cuh"

#include "dev/attention_backward_reference.h"
#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

using llmc::cuda::AttentionSizes;

// Both widths of tiles, full and padded; sequences of one query, of whole tiles, and of partial tiles.
const std::vector<AttentionSizes> attention_shapes = {{1, 136, 1, 16}, {1, 40, 1, 16},  {1, 1, 1, 64},
                                                      {2, 33, 3, 40},  {1, 160, 1, 64}, {1, 70, 2, 128},
                                                      {1, 129, 1, 96}};
const std::vector<AttentionSizes> attention_shapes_for_races = {{1, 136, 1, 16}, {1, 66, 1, 72}};

template <class X>
struct AttentionInputs {
    AttentionSizes s;
    Array<X> qkv, out, dout;
    Array<float> lse, cpu_workspace;

    AttentionInputs(const AttentionSizes& sizes, Draw& draw)
        : s(sizes),
          qkv(elements() * 3),
          out(elements()),
          dout(elements()),
          lse(s.all_heads() * s.sequence),
          cpu_workspace(
              static_cast<std::int64_t>(cpu().workspace_bytes(workspace_request()) / sizeof(float))) {
        cpu().set_workspace(tensor(cpu_workspace, {cpu_workspace.size()}));
        draw.normal(qkv, 1);
        draw.normal(dout, 1);
        cpu().attention_forward(out_tensor(out), lse_tensor(), qkv_tensor(qkv));
    }

    ~AttentionInputs() { cpu().set_workspace({}); }

    llmc::WorkspaceRequest workspace_request() const {
        const std::int64_t channels = std::int64_t{s.heads} * s.head_size;
        return {s.batch, s.sequence, channels, s.heads, channels, 1, llmc::DType::fp32};
    }
    std::int64_t elements() const { return s.all_heads() * s.sequence * s.head_size; }
    llmc::Tensor qkv_tensor(Array<X>& array) const {
        return tensor(array, {s.batch, s.sequence, 3, s.heads, s.head_size});
    }
    llmc::Tensor out_tensor(Array<X>& array) const {
        return tensor(array, {s.batch, s.sequence, s.heads, s.head_size});
    }
    llmc::Tensor lse_tensor() { return tensor(lse, {s.batch, s.heads, s.sequence}); }
};

template <class X>
void launch_backward(const LaunchContext& on, Array<X>& dqkv, const AttentionInputs<X>& in) {
    // Exactly the required scratch memory, without initialized contents.
    Array<std::byte> workspace(
        static_cast<std::int64_t>(llmc::cuda::attention_backward_workspace_bytes(in.s)));
    llmc::cuda::attention_backward(on, dqkv.data(), in.dout.data(), in.qkv.data(), in.out.data(),
                                   in.lse.data(), workspace.data(), in.s);
    synchronize();
}

template <class X>
class AttentionBackward : public Kernels<X> {};
TYPED_TEST_SUITE(AttentionBackward, Dtypes);

TYPED_TEST(AttentionBackward, MatchesTheCpu) {
    using X = TypeParam;
    Draw draw(seed());
    for (const AttentionSizes& s : shapes(attention_shapes, attention_shapes_for_races)) {
        AttentionInputs<X> in(s, draw);
        Array<X> dqkv(in.qkv.size()), expected(in.qkv.size());
        cpu().attention_backward(in.qkv_tensor(expected), in.out_tensor(in.dout), in.qkv_tensor(in.qkv),
                                 in.out_tensor(in.out), in.lse_tensor());
        // Both may have the errors that the reference derives. Only the kernel for tensor cores rounds p and
        // ds.
        const auto of_kernel = lab::reference_attention_backward(
            in.dout, in.qkv, in.out, in.lse, s, std::is_same_v<X, bf16> ? lab::unit_roundoff<bf16> : 0);
        const auto of_cpu = lab::reference_attention_backward(in.dout, in.qkv, in.out, in.lse, s, 0);
        for (const auto& on : launch_contexts()) {
            dqkv.clear();
            launch_backward(on, dqkv, in);
            Comparison comparison;
            for (std::int64_t i = 0; i < dqkv.size(); ++i) {
                const auto n = static_cast<std::size_t>(i);
                comparison.see("dqkv", i, to_float(dqkv[i]), to_float(expected[i]),
                               lab::rounded<X>(of_kernel.dqkv[n], of_kernel.error[n]) +
                                   lab::rounded<X>(of_cpu.dqkv[n], of_cpu.error[n]));
            }
            EXPECT_TRUE(comparison.good())
                << "T " << s.sequence << ", HS " << s.head_size << ": " << comparison.first_failure();
        }
    }
}

// Every run gives the same bits.
TYPED_TEST(AttentionBackward, IsDeterministic) {
    using X = TypeParam;
    const LaunchContext on = launch_contexts().front();
    Draw draw(seed());
    for (const AttentionSizes& s : shapes<AttentionSizes>({{1, 40, 2, 16}, {1, 100, 2, 64}})) {
        AttentionInputs<X> in(s, draw);
        Array<X> once(in.qkv.size()), again(in.qkv.size());
        launch_backward(on, once, in);
        launch_backward(on, again, in);
        EXPECT_EQ(std::memcmp(once.data(), again.data(), once.bytes()), 0);
    }
}

TYPED_TEST(AttentionBackward, RefusesHeadSizes) {
    using X = TypeParam;
    Array<X> none(1);
    for (const int head_size : {12, 136}) {
        EXPECT_THROW(llmc::cuda::attention_backward<X>(launch_contexts().front(), none.data(), none.data(),
                                                       none.data(), none.data(), nullptr, nullptr,
                                                       {1, 1, 1, head_size}),
                     llmc::ProgrammingError);
    }
}

}  // namespace
}  // namespace kernel_test
