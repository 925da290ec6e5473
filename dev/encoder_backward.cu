// The gradient of the embedding, in four variants (llmc/device/ops.h): dwte[tokens[b,t],:] += dout[b,t,:] and
// dwpe[t,:] += the sum of dout[b,t,:] over b. Every run must give the same bits, so there are no atomic
// additions of floating-point numbers.
//
// There is one addition per element, so memory is the limit. dout is read for dwte and for dwpe (2 B T C
// elements, the second time from cache as far as it fits). The rows of dwte that occur are read and written
// in fp32. The difficulty is to find who adds what: tokens follow Zipf's law, so one in twenty may be the
// same token, while most tokens occur once or never.
//   1  A thread does a channel, and goes through all rows: no other thread adds to its column. There are only
//      C threads, each of which waits for one sum in memory before the next.
//   2  A warp does 32 pieces of a token's row: it searches all tokens for this one. V warps are active, but
//      each reads all tokens: V B T of them, from the L1 cache.
//   3  Rows are first sorted by their tokens, with a counting sort for which neither other blocks nor the
//      host have to wait. A warp finds the start of its token's rows by bisection, and reads only these rows.
//      The warp of the most frequent token runs long after all others have ended.
//   4  The sorted rows are cut into tiles of 32, one per warp, whatever their tokens: all warps have the same
//      work, and four reads in flight. A last kernel adds up, in order, the sums of runs that span several
//      tiles (llmc/device/cuda/encoder.cuh).
#include "dev/lab/lab.h"
#include "llmc/device/cuda/encoder.cuh"

namespace lab::encoder_backward_variants {

using namespace llmc::cuda;

template <class X>
__global__ void encoder_backward_kernel1(float* dwte, float* dwpe, const X* dout, const std::int32_t* tokens,
                                         std::int64_t rows, std::int64_t sequence, int channels) {
    const int c = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (c >= channels) return;
    for (std::int64_t row = 0; row < rows; ++row) {
        const float d = to_float(dout[row * channels + c]);
        dwte[static_cast<std::int64_t>(tokens[row]) * channels + c] += d;
        dwpe[row % sequence * channels + c] += d;
    }
}

// The first channel of the lane's 16 bytes. A warp has 32 pieces of the channels: group blockIdx.y.
template <class X>
__device__ __forceinline__ int channel_of_lane() {
    return static_cast<int>(blockIdx.y * warp_threads + threadIdx.x % warp_threads) * Packed<X>::size;
}
__device__ __forceinline__ std::int64_t warp_in_grid() {
    return (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_threads;
}

template <class X>
__device__ __forceinline__ void add_row(float (&sum)[Packed<X>::size], const X* row) {
    const Packed<X> piece = load(row);
    for (int j = 0; j < Packed<X>::size; ++j) sum[j] += to_float(piece[j]);
}

template <class X>
__global__ void encoder_backward_kernel2(float* dwte, const X* dout, const std::int32_t* tokens,
                                         std::int64_t rows, int channels, int vocabulary) {
    const std::int64_t token = warp_in_grid();
    if (token >= vocabulary) return;
    const int c = channel_of_lane<X>(), lane = static_cast<int>(threadIdx.x) % warp_threads;
    float sum[Packed<X>::size] = {};
    bool occurs = false;
    for (std::int64_t first = 0; first < rows; first += warp_threads) {
        const bool here = first + lane < rows && tokens[first + lane] == token;
        for (unsigned found = __ballot_sync(all_lanes, here); found != 0; found &= found - 1) {
            const std::int64_t row = first + __ffs(static_cast<int>(found)) - 1;
            if (c < channels) add_row(sum, dout + row * channels + c);
            occurs = true;
        }
    }
    if (occurs && c < channels) add_to(dwte + token * channels + c, sum);
}

// The number of rows in the order before those of token `key` of class `token_class`.
__device__ __forceinline__ std::int64_t rows_before(int token_class, int key, int class_bits,
                                                    const std::int32_t* tokens, const std::int32_t* order,
                                                    std::int64_t rows) {
    std::int64_t begin = 0, end = rows;
    while (begin < end) {
        const std::int64_t middle = (begin + end) / 2;
        const int token = tokens[order[middle]];
        const int its_class = class_of(token, class_bits);
        const bool before =
            its_class < token_class || (its_class == token_class && key_in_class(token, class_bits) < key);
        if (before) {
            begin = middle + 1;
        } else {
            end = middle;
        }
    }
    return begin;
}

template <class X>
__global__ void encoder_backward_kernel3(float* dwte, const X* dout, const std::int32_t* tokens,
                                         const std::int32_t* order, std::int64_t rows, int channels,
                                         int vocabulary, int class_bits) {
    const std::int64_t token = warp_in_grid();
    const int c = channel_of_lane<X>();
    if (token >= vocabulary || c >= channels) return;
    const int token_class = class_of(static_cast<int>(token), class_bits);
    const int key = key_in_class(static_cast<int>(token), class_bits);
    const std::int64_t begin = rows_before(token_class, key, class_bits, tokens, order, rows);
    float sum[Packed<X>::size] = {};
    std::int64_t i = begin;
    for (; i < rows && tokens[order[i]] == token; ++i) {
        add_row(sum, dout + static_cast<std::int64_t>(order[i]) * channels + c);
    }
    if (i > begin) add_to(dwte + token * channels + c, sum);
}

template <class X>
class EncoderBackward : public Problem {
  public:
    EncoderBackward(const Shape& shape, Draw& draw)
        : batch_(static_cast<int>(shape[0])),
          sequence_(shape[1]),
          channels_(static_cast<int>(shape[2])),
          vocabulary_(static_cast<int>(shape[3])),
          tokens_(batch_ * sequence_),
          dout_(batch_ * sequence_ * channels_),
          dwte_before_(std::int64_t{vocabulary_} * channels_),
          dwpe_before_(sequence_ * channels_),
          dwte_(dwte_before_.size()),
          dwpe_(dwpe_before_.size()),
          order_(batch_ * sequence_),
          partials_(encoder_partials(batch_ * sequence_, channels_)) {
        // Zipf's law: tokens 1 to 2, 2 to 4 and 4 to 8 are equally frequent.
        for (std::int64_t i = 0; i < tokens_.size(); ++i) {
            const double power = static_cast<double>(draw.below(1 << 20)) / (1 << 20);
            tokens_[i] = static_cast<std::int32_t>(std::pow(vocabulary_ + 0.5, power)) - 1;
        }
        draw.normal(dout_, 0.1);
        draw.normal(dwte_before_, 1);
        draw.normal(dwpe_before_, 1);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        float *dwte = dwte_.data(), *dwpe = dwpe_.data();
        const X* dout = dout_.data();
        const std::int32_t* tokens = tokens_.data();
        const std::int64_t rows = batch_ * sequence_;
        const auto blocks = [&](std::int64_t n, std::int64_t size) {
            return static_cast<unsigned>(blocks_for(n, size));
        };
        constexpr int pack = Packed<X>::size;
        const dim3 a_warp_a_token(blocks(vocabulary_, block_size / warp_threads),
                                  blocks(channels_, warp_threads * pack));
        const auto add_positions = [&] {
            launch(on, encoder_backward_positions_kernel4<X>,
                   blocks(sequence_ * channels_ / pack, block_size), block_size, 0, dwpe, dout, batch_,
                   sequence_ * channels_);
        };
        std::int32_t* const order = order_.data();
        switch (variant) {
            case 1:
                return launch(on, encoder_backward_kernel1<X>, blocks(channels_, block_size), block_size, 0,
                              dwte, dwpe, dout, tokens, rows, sequence_, channels_);
            case 2:
                add_positions();
                return launch(on, encoder_backward_kernel2<X>, a_warp_a_token, block_size, 0, dwte, dout,
                              tokens, rows, channels_, vocabulary_);
            case 3:
                add_positions();
                order_rows(on, order, tokens, {0, vocabulary_}, static_cast<int>(rows));
                return launch(on, encoder_backward_kernel3<X>, a_warp_a_token, block_size, 0, dwte, dout,
                              tokens, order, rows, channels_, vocabulary_, token_class_bits(vocabulary_));
            case 4:
                return encoder_backward(on, dwte, dwpe, dout, tokens, {0, vocabulary_}, batch_, sequence_,
                                        channels_, {order, partials_.data()}, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override {
        dwte_.copy_from(dwte_before_);
        dwpe_.copy_from(dwpe_before_);
        order_.clear();
        partials_.clear();
    }

    void compare(Comparison& comparison) override {
        if (sums_.empty()) make_reference();
        // The number of fp32 additions is the number of terms besides the first.
        const auto compare_all = [&](const char* what, const Array<float>& got, const Sum* sums) {
            for (std::int64_t i = 0; i < got.size(); ++i) {
                comparison.see(what, i, got[i], sums[i].value,
                               sums[i].additions * unit_roundoff<float> * sums[i].magnitude + 0x1p-126);
            }
        };
        compare_all("dwte", dwte_, sums_.data());
        compare_all("dwpe", dwpe_, sums_.data() + dwte_.size());
    }

    double bytes() const override {
        std::vector<char> occurs(static_cast<std::size_t>(vocabulary_));
        for (std::int64_t i = 0; i < tokens_.size(); ++i) occurs[static_cast<std::size_t>(tokens_[i])] = 1;
        const auto distinct = static_cast<double>(std::count(occurs.begin(), occurs.end(), 1));
        return static_cast<double>(dout_.bytes() + 2 * dwpe_.bytes()) +
               2 * distinct * static_cast<double>(channels_ * sizeof(float));
    }

  private:
    struct Sum {
        double value, magnitude, additions;
        void add(double x) {
            value += x;
            magnitude += std::fabs(x);
            ++additions;
        }
    };

    void make_reference() {
        for (const Array<float>* before : {&dwte_before_, &dwpe_before_}) {
            for (std::int64_t i = 0; i < before->size(); ++i) {
                sums_.push_back({(*before)[i], std::fabs((*before)[i]), 0});
            }
        }
        Sum* const dwpe = sums_.data() + dwte_.size();
        for (std::int64_t i = 0; i < dout_.size(); ++i) {
            const std::int64_t row = i / channels_, c = i % channels_;
            const double d = to_float(dout_[i]);
            sums_[static_cast<std::size_t>(tokens_[row] * std::int64_t{channels_} + c)].add(d);
            dwpe[row % sequence_ * channels_ + c].add(d);
        }
    }

    int batch_;
    std::int64_t sequence_;
    int channels_, vocabulary_;
    Array<std::int32_t> tokens_;
    Array<X> dout_;
    Array<float> dwte_before_, dwpe_before_, dwte_, dwpe_;
    Array<std::int32_t> order_;
    Array<float> partials_;
    std::vector<Sum> sums_;
};

const Registration registration({
    .name = "encoder_backward",
    .sizes = {"batch", "sequence", "channels", "vocabulary"},
    .variants = {{1, "a thread does a channel", {32, 128, 512}},
                 {2, "a warp looks for a token's rows", {32, 128, 512}},
                 {3, "rows in the order of their tokens", {32, 256}},
                 {4, "tiles of ordered rows", {64, 256}}},
    .checked = {{2, 5, 8, 4}, {1, 1, 264, 3}, {3, 67, 72, 300}, {40, 8, 264, 5}},
    .timed = {{8, 1024, 768, 50304}, {64, 1024, 768, 50304}},
    .takes = {},
    .make = make_problem<EncoderBackward>,
    .checked_for_races = {{3, 24, 40, 7}},
});

}  // namespace lab::encoder_backward_variants
