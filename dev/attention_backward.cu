// Causal attention backward, in five variants (llmc/device/ops.h: attention_backward). The inputs are dout,
// and the forward pass's qkv, out and log-sum-exp:
//   p = exp(s - lse),  ds = p (dout v^T - D),  dv = p^T dout,  dk = ds^T q,  dq = ds k
//
// There are five products of T x T x HS, half of them hidden by the causal mask: 5 B NH T^2 HS operations,
// and only 8 B T C elements to move. At T = 1024 that is hundreds of operations per byte. Arithmetic is the
// limit, so the goal is to feed the tensor cores. The 312 TFLOP/s of an A100 are 2048 operations per cycle
// and multiprocessor. Shared memory gives 128 bytes per cycle, half a byte for each 8 operations. Data read
// from it must thus be reused in registers.
//   1  p and ds are T x T matrices in memory, with a thread for each element. At T = 4096 and 12 heads they
//      take two times 800 MB per sequence, and no number that is read is reused.
//   2  Tiles in shared memory; p and ds are recomputed when needed, so no T x T matrix is in memory. Two
//      kernels without atomics: one owns queries, one owns keys. fp32 on the ordinary cores, which are 16
//      times slower (llmc/device/cuda/attention_backward_fp32.cuh: fp32 runs this).
//   3  Tensor cores: 16 rows per warp; p and ds stay in registers from one product to the next. But the rows
//      of a tile are in the same banks, so that reading 8 rows takes 8 times as long. All threads wait for
//      each tile.
//   4  Rows are swizzled over the banks. Tiles are copied asynchronously while others are in use. 32 rows per
//      warp. This is one kernel of 5 products: ds goes through shared memory, and dq through memory in fp32.
//      Without atomics a block must do a whole head. A GPU is then full only with as many heads as it has
//      multiprocessors.
//   5  The same in two kernels of 3 and 4 products: more arithmetic, but nothing is exchanged and no sum is
//      read back. There is a block for each 128 queries or keys (llmc/device/cuda/attention_backward.cuh).
// Query heads may share keys and values, and a window may hide keys. Variants 2 and 5 have both. A block of
// the kernel that owns keys goes over all query heads that share them: dk and dv are then sums in registers,
// and nothing more is moved or added. In variants 2 to 5 a thread or warp has a fixed share of a tile, so
// they have one block size.
#include "llmc/device/cuda/attention_backward.cuh"

#include "dev/attention_backward_reference.h"
#include "dev/attention_forward_reference.h"
#include "dev/lab/lab.h"

namespace lab::attention_backward_variants {

using namespace llmc::cuda;

inline constexpr int no_window = 1 << 30;  // hides nothing

// ---- a head's place, from its number b H + h; there are as many key heads as query heads ----

template <class X>
__device__ HeadRows<X> head_of_qkv(const QueryKeyValue<X>& qkv, const AttentionSizes& s, int part, int head) {
    const RowHeads<X>& heads = part == 0 ? qkv.q : part == 1 ? qkv.k : qkv.v;
    return head_of(heads, s, head / s.heads, head % s.heads);
}
template <class X>
__device__ HeadRows<X> head_of_out(X* out, const AttentionSizes& s, int head) {
    return llmc::cuda::head_of_out(out, s, head / s.heads, head % s.heads);
}

// ---- 1: T x T matrices ----

// Writes lse for base 2, and D, of each query, also for kernels 3 and 4. A thread does a query.
template <class X>
__global__ void row_values_kernel1(float* row_values, const X* dout, const X* out, const float* lse,
                                   AttentionSizes s, int padded_sequence) {
    const int t = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x),
              head = static_cast<int>(blockIdx.y);
    if (t >= padded_sequence) return;
    float d = 0, log2_sum = INFINITY;
    if (t < s.sequence) {
        const X *const g = head_of_out(dout, s, head).row(t), *const o = head_of_out(out, s, head).row(t);
        for (int c = 0; c < s.head_size; ++c) d += to_float(g[c]) * to_float(o[c]);
        log2_sum = lse[std::int64_t{head} * s.sequence + t] * log2_e;
    }
    float* const to = row_values + 2 * (std::int64_t{head} * padded_sequence + t);
    to[0] = log2_sum;
    to[1] = d;
}

// A thread does a query and a key; neighboring threads have neighboring keys.
template <class X>
__global__ void attention_backward_scores_kernel1(float* p, float* ds, const float* row_values, const X* dout,
                                                  QueryKeyValue<const X> qkv, AttentionSizes s,
                                                  int padded_sequence, float scale) {
    const int j = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), t = static_cast<int>(blockIdx.y);
    const int head = static_cast<int>(blockIdx.z);
    if (j > t) return;
    const X *const q = head_of_qkv(qkv, s, 0, head).row(t), *const k = head_of_qkv(qkv, s, 1, head).row(j);
    const X *const v = head_of_qkv(qkv, s, 2, head).row(j), *const g = head_of_out(dout, s, head).row(t);
    float score = 0, dp = 0;
    for (int c = 0; c < s.head_size; ++c) {
        score += to_float(q[c]) * to_float(k[c]);
        dp += to_float(g[c]) * to_float(v[c]);
    }
    const float* const row = row_values + 2 * (std::int64_t{head} * padded_sequence + t);
    const std::int64_t place = (std::int64_t{head} * s.sequence + t) * s.sequence + j;
    p[place] = exp2_approximate(score * scale - row[0]);
    ds[place] = p[place] * (dp - row[1]);
}

// A thread does an element of dq, dk and dv.
template <class X>
__global__ void attention_backward_sums_kernel1(QueryKeyValue<X> dqkv, const float* p, const float* ds,
                                                const X* dout, QueryKeyValue<const X> qkv, AttentionSizes s,
                                                float scale) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const int t = i / s.head_size, c = i % s.head_size, head = static_cast<int>(blockIdx.y);
    if (t >= s.sequence) return;
    const std::int64_t start = std::int64_t{head} * s.sequence * s.sequence;
    float dq = 0, dk = 0, dv = 0;
    for (int j = 0; j <= t; ++j) {
        dq += ds[start + std::int64_t{t} * s.sequence + j] * to_float(head_of_qkv(qkv, s, 1, head).row(j)[c]);
    }
    for (int query = t; query < s.sequence; ++query) {
        const std::int64_t place = start + std::int64_t{query} * s.sequence + t;
        dk += ds[place] * to_float(head_of_qkv(qkv, s, 0, head).row(query)[c]);
        dv += p[place] * to_float(head_of_out(dout, s, head).row(query)[c]);
    }
    head_of_qkv(dqkv, s, 0, head).row(t)[c] = from_float<X>(dq * scale * ln_2);
    head_of_qkv(dqkv, s, 1, head).row(t)[c] = from_float<X>(dk * scale * ln_2);
    head_of_qkv(dqkv, s, 2, head).row(t)[c] = from_float<X>(dv);
}

// ---- 3: tensor cores ----

// Rows are contiguous: eight rows at the same column are in the same banks.
template <int rows_, int columns_>
struct LinearTile {
    using Element = bf16;
    static constexpr int rows = rows_, columns = columns_, chunks = columns / 8;
    static constexpr std::size_t elements = std::size_t{rows} * columns;
    bf16* data;

    __device__ __forceinline__ bf16* chunk(int row, int c) const { return data + row * columns + c * 8; }

    // Copies rows first ... of a head through registers.
    __device__ __forceinline__ void copy_rows(HeadRows<const bf16> from, int first,
                                              const AttentionSizes& s) const {
        for (int i = static_cast<int>(threadIdx.x); i < rows * chunks; i += static_cast<int>(blockDim.x)) {
            const int r = i / chunks, c = i % chunks;
            const bool inside = first + r < s.sequence && c * 8 < s.head_size;
            store(chunk(r, c), inside ? load(from.row(first + r) + c * 8) : Packed<bf16>{});
        }
    }
};

template <int columns_>
struct FirstTiling {
    using Element = bf16;
    static constexpr int columns = columns_, depth = columns / 16, threads = 128;
    static constexpr int row_blocks = 1, warp_rows = 16, owned = 64, step = 32, step_blocks = step / 16;
    using Owned = LinearTile<owned, columns>;
    using Moving = LinearTile<step, columns>;
    using Scores = Block[row_blocks][step_blocks];
    using Sums = Block[row_blocks][depth];

    static constexpr std::size_t shared_bytes = 2 * SharedAllocator::bytes<bf16>(Owned::elements) +
                                                2 * SharedAllocator::bytes<bf16>(Moving::elements);

    static __device__ __forceinline__ void store_sums(HeadRows<bf16> to, int first, const AttentionSizes& s,
                                                      const Sums& sums, float factor) {
        for_each<depth>([&](int n, int j, int i) {
            const int t = first + block_row(i), c = 16 * n + block_column(j, i);
            if (t < s.sequence && c < s.head_size) to.row(t)[c] = from_float<bf16>(sums[0][n][j][i] * factor);
        });
    }
    template <int blocks, class F>
    static __device__ __forceinline__ void for_each(const F& f) {
#pragma unroll
        for (int n = 0; n < blocks; ++n) {
#pragma unroll
            for (int i = 0; i < 8; ++i) f(n, i / 4, i % 4);
        }
    }
};

// A block owns a tile of queries, or of keys with their values, and goes over tiles of the others.
template <int columns, bool owns_queries>
__global__ void __launch_bounds__(128)
    attention_backward_kernel3(QueryKeyValue<bf16> dqkv, const float* row_values, const bf16* dout,
                               QueryKeyValue<const bf16> qkv, AttentionSizes s, int padded_sequence,
                               float scale) {
    using T = FirstTiling<columns>;
    const int head = static_cast<int>(blockIdx.y), first = static_cast<int>(blockIdx.x) * T::owned;
    const int row = own_warp() * T::warp_rows;
    const HeadRows<const bf16> q = head_of_qkv(qkv, s, 0, head), k = head_of_qkv(qkv, s, 1, head),
                               v = head_of_qkv(qkv, s, 2, head), g = head_of_out(dout, s, head);
    SharedAllocator shared;
    const typename T::Owned own1{shared.take<bf16>(T::Owned::elements)};  // q or k
    const typename T::Owned own2{shared.take<bf16>(T::Owned::elements)};  // dout or v
    const typename T::Moving other1{shared.take<bf16>(T::Moving::elements)};
    const typename T::Moving other2{shared.take<bf16>(T::Moving::elements)};
    own1.copy_rows(owns_queries ? q : k, first, s);
    own2.copy_rows(owns_queries ? g : v, first, s);

    typename T::Sums of_ds = {}, of_p = {};
    const int begin = owns_queries ? 0 : first,
              end = owns_queries ? min(s.sequence, first + T::owned) : s.sequence;
    for (int other = begin; other < end; other += T::step) {
        __syncthreads();
        other1.copy_rows(owns_queries ? k : q, other, s);
        other2.copy_rows(owns_queries ? v : g, other, s);
        __syncthreads();
        typename T::Scores p = {}, ds = {};
        score_products<T>(
            p, [&](Operand& a, int, int c, int lane) { load_a(a, own1, row, 16 * c, lane); }, other1);
        score_products<T>(
            ds, [&](Operand& a, int, int c, int lane) { load_a(a, own2, row, 16 * c, lane); }, other2);
        T::template for_each<T::step_blocks>([&](int n, int j, int i) {
            const int mine = first + row + block_row(i), theirs = other + 16 * n + block_column(j, i);
            const int query = owns_queries ? mine : theirs, key = owns_queries ? theirs : mine;
            const float* const values = row_values + 2 * (std::int64_t{head} * padded_sequence + query);
            const float x = key <= query ? exp2_approximate(p[0][n][j][i] * scale - values[0]) : 0;
            p[0][n][j][i] = x;
            ds[0][n][j][i] = x * (ds[0][n][j][i] - values[1]);
        });
        add_products<T>(of_ds, ds, other1);
        if constexpr (!owns_queries) add_products<T>(of_p, p, other2);
    }
    T::store_sums(head_of_qkv(dqkv, s, owns_queries ? 0 : 1, head), first + row, s, of_ds, scale * ln_2);
    if constexpr (!owns_queries) T::store_sums(head_of_qkv(dqkv, s, 2, head), first + row, s, of_p, 1);
}

// ---- 4: a block does a head, with 5 products ----

// Warps own keys as in kernel 5. The ds of all warps goes through shared memory, where dq is summed over the
// keys; each warp does a quarter of the columns of dq. dq_sums fp32 (B,NH,T,columns) holds dq between tiles
// of keys. A thread reads there only what it has written.
template <int columns>
__global__ void __launch_bounds__(128)
    attention_backward_kernel4(QueryKeyValue<bf16> dqkv, float* dq_sums, const float* row_values,
                               const bf16* dout, QueryKeyValue<const bf16> qkv, AttentionSizes s,
                               int padded_sequence, float scale) {
    using T = AttentionBackwardTiling<bf16, columns>;
    constexpr int quarter = columns / T::warps, quarter_blocks = quarter / 16;
    const int head = static_cast<int>(blockIdx.x);
    const int warp = own_warp(), row = warp * T::warp_rows;
    SharedAllocator shared;
    const typename T::Owned keys{shared.take<bf16>(T::Owned::elements)};
    const typename T::Owned values{shared.take<bf16>(T::Owned::elements)};
    const Tile<bf16, T::owned, 64> weights{
        shared.take<bf16>(Tile<bf16, T::owned, 64>::elements)};  // ds^T, half used
    bf16* const stages = shared.take<bf16>(2 * T::stages * T::Moving::elements);
    const auto queries = [&](int stage) {
        return typename T::Moving{stages + 2 * stage * T::Moving::elements};
    };
    const auto douts = [&](int stage) {
        return typename T::Moving{stages + (2 * stage + 1) * T::Moving::elements};
    };
    const auto load_stage = [&](int stage, int query) {
        load_tile<T::threads>(queries(stage), head_of_qkv(qkv, s, 0, head), query, s.sequence, s.head_size);
        load_tile<T::threads>(douts(stage), head_of_out(dout, s, head), query, s.sequence, s.head_size);
        copy_async_commit();
    };

    for (int first = 0; first < s.sequence; first += T::owned) {
        __syncthreads();
        load_tile<T::threads>(keys, head_of_qkv(qkv, s, 1, head), first, s.sequence, s.head_size);
        load_tile<T::threads>(values, head_of_qkv(qkv, s, 2, head), first, s.sequence, s.head_size);
        load_stage(0, first);
        typename T::Sums dk = {}, dv = {};
        for (int query = first, stage = 0; query < s.sequence; query += T::step, stage ^= 1) {
            copy_async_wait<0>();
            __syncthreads();
            if (query + T::step < s.sequence) load_stage(stage ^ 1, query + T::step);
            typename T::Scores p = {}, ds = {};
            score_products<T>(
                p, [&](Operand& a, int m, int c, int lane) { load_a(a, keys, row + 16 * m, 16 * c, lane); },
                queries(stage));
            score_products<T>(
                ds,
                [&](Operand& a, int m, int c, int lane) { load_a(a, values, row + 16 * m, 16 * c, lane); },
                douts(stage));
            if (first + row + T::warp_rows > query + 1) hide_transposed<T>(p, first + row, query, no_window);
            weigh_transposed<T>(p, ds, row_values + 2 * (std::int64_t{head} * padded_sequence + query),
                                scale);
#pragma unroll
            for (int m = 0; m < T::row_blocks; ++m) {
#pragma unroll
                for (int n = 0; n < T::step_blocks; ++n)
                    round_to_tile(weights, row + 16 * m, 16 * n, ds[m][n]);
            }
            add_products<T>(dv, p, douts(stage));
            add_products<T>(dk, ds, queries(stage));
            __syncthreads();

            Block dq[T::step_blocks][quarter_blocks] = {};
#pragma unroll 2
            for (int k = 0; k < T::owned; k += 16) {
                Operand a[T::step_blocks];
#pragma unroll
                for (int m = 0; m < T::step_blocks; ++m) load_a_transposed(a[m], weights, k, 16 * m);
#pragma unroll
                for (int n = 0; n < quarter_blocks; ++n) {
                    Operand b;
                    load_b(b, keys, k, quarter * warp + 16 * n);
#pragma unroll
                    for (int m = 0; m < T::step_blocks; ++m) multiply_add<bf16>(dq[m][n], a[m], b);
                }
            }
            const bool complete = query < first + T::owned;
#pragma unroll
            for (int m = 0; m < T::step_blocks; ++m) {
#pragma unroll
                for (int i = 0; i < 8 * quarter_blocks; ++i) {
                    const int t = query + 16 * m + block_row(i % 4);
                    const int c = quarter * warp + 16 * (i / 8) + block_column(i / 4 % 2, i);
                    if (t >= s.sequence || c >= s.head_size) continue;
                    float& before = dq_sums[(std::int64_t{head} * s.sequence + t) * columns + c];
                    const float sum = dq[m][i / 8][i / 4 % 2][i % 4] + (first > 0 ? before : 0);
                    if (complete) {
                        head_of_qkv(dqkv, s, 0, head).row(t)[c] = from_float<bf16>(sum * scale * ln_2);
                    } else {
                        before = sum;
                    }
                }
            }
        }
        __syncthreads();
        store_sums<T>(head_of_qkv(dqkv, s, 1, head), first, s, dk, scale * ln_2, keys, row);
        store_sums<T>(head_of_qkv(dqkv, s, 2, head), first, s, dv, 1.0f, values, row);
    }
}

template <class X>
class AttentionBackward : public Problem {
  public:
    AttentionBackward(const Shape& shape, Draw& draw)
        : s_{shape[0],
             static_cast<int>(shape[1]),
             static_cast<int>(shape[2]),
             static_cast<int>(shape[3]),
             static_cast<int>(shape[4]),
             window_of(shape[5], shape[1])},
          qkv_(shape[0] * shape[1] * packed_row(s_)),
          out_(elements()),
          dout_(elements()),
          dqkv_(qkv_.size()),
          lse_(s_.all_heads() * s_.sequence),
          row_values_(2 * s_.all_heads() * padded_sequence()) {
        draw.normal(qkv_, 1);
        draw.normal(dout_, 1);
        if (s_.sequence <= 512) {
            reference_attention_forward(out_, lse_, qkv_, s_);
        } else {  // only timed
            draw.normal(out_, 0.1);
            lse_.fill(std::log(static_cast<float>(s_.sequence)));
        }
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        if (variant == 5) {
            return llmc::cuda::attention_backward(on, gradients(), dout_.data(), inputs(), out_.data(),
                                                  lse_.data(), scratch(workspace_floats()), s_);
        }
        if constexpr (!std::is_same_v<X, fp16>) return run_earlier(variant, block_size, on);
        llmc::programming_error("no such variant");
    }

    void run_earlier(int variant, int block_size, const LaunchContext& on) {
        if constexpr (std::is_same_v<X, bf16>) {
            if (variant == 3) return s_.head_size <= 64 ? run3<64>(on) : run3<128>(on);
            if (variant == 4) return s_.head_size <= 64 ? run4<64>(on) : run4<128>(on);
        }
        switch (variant) {
            case 1:
                return run1(block_size, on);
            case 2:
                return s_.head_size <= 64 ? run2<64>(on) : run2<128>(on);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override {
        dqkv_.clear();
        row_values_.clear();
        if (scratch_) scratch_->clear();
        if (weights_) weights_->clear();
    }

    void compare(Comparison& comparison) override {
        if (!reference_) {
            reference_ = std::make_unique<AttentionGradients>(
                reference_attention_backward(dout_, qkv_, out_, lse_, s_, rounding_of_weights<X>));
        }
        for (std::int64_t i = 0; i < dqkv_.size(); ++i) {
            const auto n = static_cast<std::size_t>(i);
            const double wanted = reference_->dqkv[n];
            comparison.see("dqkv", i, to_float(dqkv_[i]), wanted, rounded<X>(wanted, reference_->error[n]));
        }
    }

    double bytes() const override {
        return 2.0 * static_cast<double>(qkv_.bytes() + out_.bytes()) + static_cast<double>(lse_.bytes());
    }
    // 2.5 times those of the forward pass
    double flops() const override { return 2.5 * 4 * s_.head_size * pairs_of(s_); }

  private:
    std::int64_t elements() const { return s_.all_heads() * s_.sequence * s_.head_size; }
    int padded_sequence() const { return blocks_for(s_.sequence, 128) * 128; }
    std::int64_t workspace_floats() const {
        return static_cast<std::int64_t>(attention_backward_workspace_bytes(s_) / sizeof(float));
    }
    // Memory of `floats` floats that only some variants need.
    float* scratch(std::int64_t floats) {
        if (!scratch_ || scratch_->size() < floats) scratch_ = std::make_unique<Array<float>>(floats);
        return scratch_->data();
    }
    QueryKeyValue<const X> inputs() const { return packed_heads<const X>(qkv_.data(), s_); }
    QueryKeyValue<X> gradients() { return packed_heads(dqkv_.data(), s_); }
    unsigned heads() const { return static_cast<unsigned>(s_.all_heads()); }

    void make_row_values(int block_size, const LaunchContext& on) {
        const auto blocks = static_cast<unsigned>(blocks_for(padded_sequence(), block_size));
        launch(on, row_values_kernel1<X>, dim3(blocks, heads()), block_size, 0, row_values_.data(),
               dout_.data(), out_.data(), lse_.data(), s_, padded_sequence());
    }

    void run1(int block_size, const LaunchContext& on) {
        const std::int64_t matrix = s_.all_heads() * s_.sequence * s_.sequence;
        // A separate array, since in the tests each array has its own red zones.
        if (!weights_ || weights_->size() < matrix) weights_ = std::make_unique<Array<float>>(matrix);
        float *p = weights_->data(), *ds = scratch(matrix);
        const auto sequence = static_cast<unsigned>(s_.sequence);
        make_row_values(block_size, on);
        launch(on, attention_backward_scores_kernel1<X>,
               dim3(static_cast<unsigned>(blocks_for(s_.sequence, block_size)), sequence, heads()),
               block_size, 0, p, ds, row_values_.data(), dout_.data(), inputs(), s_, padded_sequence(),
               attention_scale(s_));
        launch(on, attention_backward_sums_kernel1<X>,
               dim3(static_cast<unsigned>(blocks_for(s_.sequence * s_.head_size, block_size)), heads()),
               block_size, 0, gradients(), p, ds, dout_.data(), inputs(), s_, attention_scale(s_));
    }

    template <int columns>
    void run2(const LaunchContext& on) {
        launch_plain_attention_backward<columns>(on, gradients(), dout_.data(), inputs(), out_.data(),
                                                 lse_.data(), row_values_.data(), s_);
    }

    template <int columns>
    void run3(const LaunchContext& on) {
        using T = FirstTiling<columns>;
        make_row_values(T::threads, on);
        const dim3 grid(static_cast<unsigned>(blocks_for(s_.sequence, T::owned)), heads());
        const auto launch_one = [&](auto kernel) {
            launch(on, kernel, grid, T::threads, T::shared_bytes, gradients(), row_values_.data(),
                   dout_.data(), inputs(), s_, padded_sequence(), attention_scale(s_));
        };
        launch_one(attention_backward_kernel3<columns, true>);
        launch_one(attention_backward_kernel3<columns, false>);
    }

    template <int columns>
    void run4(const LaunchContext& on) {
        using T = AttentionBackwardTiling<bf16, columns>;
        constexpr std::size_t shared_bytes =
            2 * SharedAllocator::bytes<bf16>(T::Owned::elements) +
            SharedAllocator::bytes<bf16>(Tile<bf16, T::owned, 64>::elements) +
            SharedAllocator::bytes<bf16>(2 * T::stages * T::Moving::elements);
        make_row_values(T::threads, on);
        launch(on, attention_backward_kernel4<columns>, heads(), T::threads, shared_bytes, gradients(),
               scratch(s_.all_heads() * s_.sequence * columns), row_values_.data(), dout_.data(), inputs(),
               s_, padded_sequence(), attention_scale(s_));
    }

    AttentionSizes s_;
    Array<X> qkv_, out_, dout_, dqkv_;
    Array<float> lse_, row_values_;
    std::unique_ptr<Array<float>> scratch_, weights_;
    std::unique_ptr<AttentionGradients> reference_;
};

const Registration registration({
    .name = "attention_backward",
    .sizes = {"B", "T", "H", "D", "K", "window"},
    .variants = {{1, "p and ds as matrices in memory", {32, 128}},
                 {2, "tiles in shared memory, fp32", {256}},
                 {3, "tensor cores", {128}},
                 {4, "5 products, a block does a head", {128}},
                 {5, "7 products, a block does 128 rows", {128}}},
    .checked = {{1, 24, 1, 8, 1, 0},
                {1, 1, 1, 64, 1, 0},
                {2, 33, 2, 40, 2, 0},
                {1, 140, 1, 64, 1, 0},
                {1, 72, 2, 128, 2, 0},
                {1, 72, 4, 24, 2, 0},
                {1, 150, 2, 16, 1, 35}},
    .timed = {{16, 1024, 12, 64, 12, 0},
              {4, 4096, 12, 64, 12, 0},
              {8, 1024, 16, 128, 16, 0},
              {2, 4096, 16, 128, 16, 0},
              {1, 8192, 32, 128, 8, 0},
              {1, 8192, 32, 128, 8, 1024}},
    // Variants 2 and 5 have key heads that query heads share, and windows. Tensor cores multiply bf16. The
    // matrices of variant 1 do not fit memory for a long sequence.
    .takes =
        [](int variant, llmc::DType dtype, const Shape& shape) {
            const bool plain = shape[4] == shape[2] && shape[5] == 0;
            if (!plain && variant != 2 && variant != 5) return false;
            if (variant == 5) return dtype != llmc::DType::fp32;
            if (variant == 1 && shape[1] > 1024) return false;
            return variant <= 2 ? dtype != llmc::DType::fp16 : dtype == llmc::DType::bf16;
        },
    .make = make_problem<AttentionBackward>,
    .checked_for_races = {{1, 24, 2, 8, 2, 0}, {1, 34, 2, 128, 2, 0}, {1, 134, 1, 64, 1, 0}},
});

}  // namespace lab::attention_backward_variants
