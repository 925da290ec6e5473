// Attention's backward kernels against the CPU device.
#include "llmc/device/cuda/attention_backward.cuh"

#include "dev/attention_backward_reference.h"
#include "llmc/device/heads.h"
#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

using llmc::cuda::AttentionSizes;
using llmc::cuda::from_float;

// Both widths of tiles, full and padded; sequences of one query, of whole tiles, and of partial tiles. Then
// key heads that query heads share, and windows: of one key, within a tile, across tiles, as long as a tile
// of keys or the sequence.
const std::vector<AttentionSizes> attention_shapes = {
    {1, 136, 1, 16},        {1, 40, 1, 16},       {1, 1, 1, 64},          {2, 33, 3, 40},
    {1, 160, 1, 64},        {1, 70, 2, 128},      {1, 129, 1, 96},        {2, 40, 4, 16, 2},
    {1, 70, 3, 72, 1},      {1, 40, 1, 24, 1, 1}, {1, 300, 2, 16, 1, 35}, {1, 200, 1, 72, 1, 67},
    {1, 260, 1, 8, 1, 128}, {1, 66, 2, 8, 2, 66}};
const std::vector<AttentionSizes> attention_shapes_for_races = {
    {1, 136, 1, 16}, {1, 66, 1, 72}, {1, 140, 2, 16, 1, 40}};

template <class X>
struct AttentionInputs {
    AttentionSizes s;
    Array<X> qkv, out, dout;
    Array<float> lse, cpu_workspace;

    AttentionInputs(const AttentionSizes& sizes, Draw& draw)
        : s(sizes),
          qkv(rows() * row()),
          out(elements()),
          dout(elements()),
          lse(s.all_heads() * s.sequence),
          cpu_workspace(
              static_cast<std::int64_t>(cpu_sizes().workspace_bytes(workspace_request()) / sizeof(float))) {
        cpu().set_workspace(tensor(cpu_workspace, {cpu_workspace.size()}));
        draw.normal(qkv, 1);
        draw.normal(dout, 1);
        const auto [q, k, v] = heads(qkv);
        cpu().run(llmc::AttentionForward{out_tensor(out), lse_tensor(), q, k, v, s.window});
    }

    ~AttentionInputs() { cpu().set_workspace({}); }

    void run_on_cpu(Array<X>& dqkv) {
        const auto [q, k, v] = heads(qkv);
        const auto [dq, dk, dv] = heads(dqkv);
        cpu().run(llmc::AttentionBackward{dq, dk, dv, out_tensor(dout), q, k, v, out_tensor(out),
                                          lse_tensor(), s.window});
    }

    llmc::WorkspaceRequest workspace_request() const {
        const std::int64_t channels = std::int64_t{s.heads} * s.head_size;
        return {s.batch, s.sequence, channels, s.heads, channels, 1, llmc::DType::fp32};
    }
    std::int64_t rows() const { return s.batch * s.sequence; }
    std::int64_t row() const { return (s.heads + 2 * std::int64_t{s.key_heads}) * s.head_size; }
    std::int64_t elements() const { return s.all_heads() * s.sequence * s.head_size; }
    llmc::PackedHeads heads(Array<X>& array) const {
        return llmc::packed_heads(tensor(array, {rows(), row()}), s.heads, s.key_heads, s.head_size);
    }
    llmc::Tensor out_tensor(Array<X>& array) const {
        return tensor(array, {s.batch, s.sequence, s.heads, s.head_size});
    }
    llmc::Tensor lse_tensor() { return tensor(lse, {s.batch, s.heads, s.sequence}); }
};

template <class X>
void launch_backward(const LaunchContext& on, const llmc::cuda::QueryKeyValue<X>& dqkv,
                     const llmc::cuda::QueryKeyValue<const X>& qkv, const AttentionInputs<X>& in) {
    // Exactly the required scratch memory, without initialized contents.
    Array<std::byte> workspace(
        static_cast<std::int64_t>(llmc::cuda::attention_backward_workspace_bytes(in.s)));
    llmc::cuda::attention_backward(on, dqkv, in.dout.data(), qkv, in.out.data(), in.lse.data(),
                                   workspace.data(), in.s);
    synchronize();
}
template <class X>
void launch_backward(const LaunchContext& on, Array<X>& dqkv, const AttentionInputs<X>& in) {
    launch_backward<X>(on, llmc::cuda::packed_heads(dqkv.data(), in.s),
                       llmc::cuda::packed_heads(in.qkv.data(), in.s), in);
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
        in.run_on_cpu(expected);
        // Both may have the errors that the reference derives. Only kernels for tensor cores round p and ds.
        const auto of_kernel = lab::reference_attention_backward(in.dout, in.qkv, in.out, in.lse, s,
                                                                 lab::rounding_of_weights<X>);
        const auto of_cpu = lab::reference_attention_backward(in.dout, in.qkv, in.out, in.lse, s, {});
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
                << "T " << s.sequence << ", D " << s.head_size << ", K " << s.key_heads << ", window "
                << s.window << ": " << comparison.first_failure();
        }
    }
}

// The bits do not depend on where q, k, v and their gradients lie, and what lies beside the gradients stays.
TYPED_TEST(AttentionBackward, HeadsInTensorsOfTheirOwn) {
    using X = TypeParam;
    using llmc::cuda::RowHeads;
    const LaunchContext on = launch_contexts().front();
    Draw draw(seed());
    const AttentionSizes s{2, 37, 4, 24, 2, 20};
    AttentionInputs<X> in(s, draw);
    Array<X> packed(in.qkv.size());
    launch_backward(on, packed, in);

    // Tensors of rows with 16 elements before the heads and 8 after them.
    constexpr int before = 16, beside = before + 8;
    constexpr float other = 77;
    const auto width = [&](int part) { return (part == 0 ? s.heads : s.key_heads) * s.head_size; };
    const auto rows = static_cast<int>(in.rows());
    Array<X> q(std::int64_t{rows} * (width(0) + beside)), k(std::int64_t{rows} * (width(1) + beside)),
        v(k.size()), dq(q.size()), dk(k.size()), dv(k.size());
    Array<X>* const inputs[] = {&q, &k, &v};
    Array<X>* const gradients[] = {&dq, &dk, &dv};
    const auto [of_q, of_k, of_v] = llmc::cuda::packed_heads<const X>(in.qkv.data(), s);
    const RowHeads<const X> sources[] = {of_q, of_k, of_v};
    for (int part = 0; part < 3; ++part) {
        inputs[part]->fill(from_float<X>(other));
        gradients[part]->fill(from_float<X>(other));
        for (int n = 0; n < rows; ++n) {
            for (int c = 0; c < width(part); ++c)
                (*inputs[part])[std::int64_t{n} * (width(part) + beside) + before + c] =
                    sources[part].first[std::int64_t{n} * sources[part].stride + c];
        }
    }
    const auto heads = [&]<class Y>(Y* data, int part) {
        return RowHeads<Y>{data + before, width(part) + beside};
    };
    const X *const from_q = q.data(), *const from_k = k.data(), *const from_v = v.data();
    launch_backward<X>(on, {heads(dq.data(), 0), heads(dk.data(), 1), heads(dv.data(), 2)},
                       {heads(from_q, 0), heads(from_k, 1), heads(from_v, 2)}, in);
    const auto [to_q, to_k, to_v] = llmc::cuda::packed_heads(packed.data(), s);
    const RowHeads<X> wanted[] = {to_q, to_k, to_v};
    Comparison comparison;
    for (int part = 0; part < 3; ++part) {
        for (int n = 0; n < rows; ++n) {
            for (int c = 0; c < width(part) + beside; ++c) {
                const std::int64_t i = std::int64_t{n} * (width(part) + beside) + c;
                const bool inside = c >= before && c < before + width(part);
                comparison.see_equal(
                    part == 0   ? "dq"
                    : part == 1 ? "dk"
                                : "dv",
                    i, to_float((*gradients[part])[i]),
                    inside ? to_float(wanted[part].first[std::int64_t{n} * wanted[part].stride + c - before])
                           : other);
            }
        }
    }
    EXPECT_TRUE(comparison.good()) << comparison.first_failure();
}

// Every run gives the same bits.
TYPED_TEST(AttentionBackward, IsDeterministic) {
    using X = TypeParam;
    const LaunchContext on = launch_contexts().front();
    Draw draw(seed());
    for (const AttentionSizes& s : shapes<AttentionSizes>({{1, 40, 2, 16}, {1, 100, 2, 64, 1, 50}})) {
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
        const AttentionSizes s{1, 1, 1, head_size};
        EXPECT_THROW(llmc::cuda::attention_backward<X>(
                         launch_contexts().front(), llmc::cuda::packed_heads(none.data(), s), none.data(),
                         llmc::cuda::packed_heads<const X>(none.data(), s), none.data(), nullptr, nullptr, s),
                     llmc::ProgrammingError);
    }
}

}  // namespace
}  // namespace kernel_test
