// The embedding, in three variants: out[b,t,:] = wte[tokens[b,t],:] + wpe[t,:] (llmc/device/ops.h).
//
// There is one addition per element, so memory is the limit. B T C elements are written, and as many are read
// from wte, though the rows of repeated tokens come from cache. wpe is small and always comes from cache.
// Rows are read at random, but each is a contiguous piece of at least 1.5 KB, which memory reads efficiently.
//   1  A thread does an element. Accesses are coalesced, since channels are contiguous, but each load of 2
//      bytes needs a division and a token.
//   2  16 bytes per thread: an eighth of the threads, divisions, and loads of tokens.
//   3  A thread does its piece of a position in four samples. It reads wpe once for them, and four reads of
//      wte are in flight together. A thread waits for a token and then for its row; now it does so once for
//      four (llmc/device/cuda/encoder.cuh).
#include "dev/lab/lab.h"
#include "llmc/device/cuda/encoder.cuh"

namespace lab::encoder_forward_variants {

using namespace llmc::cuda;

template <class X>
__global__ void encoder_forward_kernel1(X* out, const std::int32_t* tokens, const X* wte, const X* wpe,
                                        std::int64_t rows, std::int64_t sequence, int channels) {
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const std::int64_t row = i / channels, c = i % channels;
    if (row >= rows) return;
    const std::int64_t token = tokens[row];
    out[i] =
        from_float<X>(to_float(wte[token * channels + c]) + to_float(wpe[row % sequence * channels + c]));
}

template <class X>
__global__ void encoder_forward_kernel2(X* out, const std::int32_t* tokens, const X* wte, const X* wpe,
                                        std::int64_t rows, std::int64_t sequence, int channels) {
    constexpr int pack = Packed<X>::size;
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int pieces = channels / pack;
    const std::int64_t row = i / pieces, c = i % pieces * pack;
    if (row >= rows) return;
    const std::int64_t token = tokens[row];
    const Packed<X> embedding = load(wte + token * channels + c);
    const Packed<X> position = load(wpe + row % sequence * channels + c);
    float sum[pack];
    for (int j = 0; j < pack; ++j) sum[j] = to_float(embedding[j]) + to_float(position[j]);
    store_streaming(out + i * pack, packed_from<X>(sum));
}

template <class X>
class EncoderForward : public Problem {
  public:
    EncoderForward(const Shape& shape, Draw& draw)
        : batch_(static_cast<int>(shape[0])),
          sequence_(shape[1]),
          channels_(static_cast<int>(shape[2])),
          vocabulary_(shape[3]),
          tokens_(batch_ * sequence_),
          wte_(vocabulary_ * channels_),
          wpe_(sequence_ * channels_),
          out_(batch_ * sequence_ * channels_) {
        draw.below(tokens_, vocabulary_);
        draw.normal(wte_, 0.1);
        draw.normal(wpe_, 0.1);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const std::int64_t rows = batch_ * sequence_;
        const auto launch_elements = [&](auto kernel, std::int64_t elements_a_thread) {
            const std::int64_t elements = elements_a_thread * block_size;
            launch(on, kernel, static_cast<unsigned>(blocks_for(rows * channels_, elements)), block_size, 0,
                   out_.data(), tokens_.data(), wte_.data(), wpe_.data(), rows, sequence_, channels_);
        };
        switch (variant) {
            case 1:
                return launch_elements(encoder_forward_kernel1<X>, 1);
            case 2:
                return launch_elements(encoder_forward_kernel2<X>, Packed<X>::size);
            case 3:
                return encoder_forward(on, out_.data(), tokens_.data(), wte_.data(), wpe_.data(),
                                       {0, static_cast<int>(vocabulary_)}, batch_, sequence_, channels_,
                                       block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override { out_.clear(); }

    void compare(Comparison& comparison) override {
        for (std::int64_t i = 0; i < out_.size(); ++i) {
            const std::int64_t row = i / channels_, c = i % channels_;
            const double sum = double{to_float(wte_[tokens_[row] * std::int64_t{channels_} + c])} +
                               to_float(wpe_[row % sequence_ * channels_ + c]);
            // The addition in fp32, and the rounding to X.
            comparison.see("out", i, to_float(out_[i]), sum,
                           rounded<X>(sum, unit_roundoff<float> * std::fabs(sum)));
        }
    }

    // Counts only the rows of wte that are read from memory: each row that occurs, once.
    double bytes() const override {
        const double rows = static_cast<double>(batch_ * sequence_), all = static_cast<double>(vocabulary_);
        const double distinct = all * (1 - std::pow(1 - 1 / all, rows));
        return static_cast<double>(out_.bytes() + wpe_.bytes()) +
               distinct * static_cast<double>(channels_ * sizeof(X)) + 4 * rows;
    }

  private:
    int batch_;
    std::int64_t sequence_;
    int channels_;
    std::int64_t vocabulary_;
    Array<std::int32_t> tokens_;
    Array<X> wte_, wpe_, out_;
};

const Registration registration({
    .name = "encoder_forward",
    .sizes = {"batch", "sequence", "channels", "vocabulary"},
    .variants = {{1, "one element a thread", {32, 128, 512}},
                 {2, "16 bytes a thread", {32, 128, 512}},
                 {3, "a piece of a position for four samples", {32, 256, 512}}},
    .checked = {{2, 3, 8, 5}, {1, 1, 264, 3}, {5, 7, 72, 101}, {9, 16, 128, 1000}},
    .timed = {{8, 1024, 768, 50304}, {64, 1024, 768, 50304}},
    .takes = {},
    .make = make_problem<EncoderForward>,
    .checked_for_races = {{5, 5, 72, 7}},
});

}  // namespace lab::encoder_forward_variants
