// Arrays and random inputs of the kernel lab and the kernels' tests. Host and kernels use the same memory:
// managed memory if nvcc compiles this, otherwise the heap. Allocations have exactly the requested bytes, so
// that AddressSanitizer finds an access past the end.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>

#include "llmc/device/cuda/packed.cuh"

namespace lab {

using llmc::cuda::bf16;
using llmc::cuda::fp16;
using llmc::cuda::from_float;
using llmc::cuda::to_float;

template <class T>
class Array {
  public:
    explicit Array(std::int64_t n) : size_(n) {
        void* memory = nullptr;
#ifdef __CUDACC__
        llmc::cuda::check_cuda(cudaMallocManaged(&memory, bytes()), "cudaMallocManaged");
#else
        llmc::check(posix_memalign(&memory, 256, bytes()) == 0, "no memory left");
#endif
        data_ = static_cast<T*>(memory);
        clear();
    }
    ~Array() {
#ifdef __CUDACC__
        cudaFree(data_);
#else
        std::free(data_);
#endif
    }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;

    // Fills with NaN in every floating-point type, which shows elements that a kernel failed to write.
    void clear() { std::memset(static_cast<void*>(data_), 0xff, bytes()); }
    void fill(T value) {
        for (std::int64_t i = 0; i < size_; ++i) data_[i] = value;
    }
    void copy_from(const Array& other) {
        llmc::check(size_ == other.size_, "arrays of different sizes");
        std::memcpy(static_cast<void*>(data_), other.data_, bytes());
    }

    T* data() { return data_; }
    const T* data() const { return data_; }
    std::int64_t size() const { return size_; }
    T& operator[](std::int64_t i) { return data_[i]; }
    const T& operator[](std::int64_t i) const { return data_[i]; }
    std::size_t bytes() const { return static_cast<std::size_t>(size_) * sizeof(T); }

  private:
    std::int64_t size_;
    T* data_ = nullptr;
};

// Random inputs, all from one seed.
class Draw {
  public:
    explicit Draw(std::uint64_t seed) : engine_(seed) {}

    // Normal numbers, rounded to X. They repeat after a million, since drawing more would take long and test
    // no more.
    template <class X>
    void normal(Array<X>& to, double deviation, double mean = 0) {
        std::normal_distribution<double> distribution(mean, deviation);
        for (std::int64_t i = 0; i < to.size(); ++i) {
            to[i] = i < period ? from_float<X>(static_cast<float>(distribution(engine_))) : to[i - period];
        }
    }
    // Uniform in 0 ... n-1.
    void below(Array<std::int32_t>& to, std::int64_t n) {
        for (std::int64_t i = 0; i < to.size(); ++i) to[i] = static_cast<std::int32_t>(below(n));
    }
    std::int64_t below(std::int64_t n) {
        return std::uniform_int_distribution<std::int64_t>(0, n - 1)(engine_);
    }

  private:
    static constexpr std::int64_t period = 1 << 20;
    std::mt19937_64 engine_;
};

}  // namespace lab
