// Tokens that are uploaded ahead: which tokens arrive, and which operations wait for others.
#include "llmc/parallel/step/token_feed.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "test/unit/fake_streams.h"

namespace llmc {
namespace {

constexpr std::int64_t B = 2, T = 4;

// The CPU device with streams that record its uploads.
class StreamDevice final : public Device {
  public:
    DeviceKind kind() const override { return cpu_->kind(); }
    std::string description() const override { return {}; }
    std::string note(DType) const override { return {}; }
    std::size_t available_memory() const override { return 0; }
    std::optional<double> peak_flops(DType) const override { return {}; }
    std::byte* allocate(std::size_t bytes, std::string_view arena) override {
        return cpu_->allocate(bytes, arena);
    }
    void release(std::byte* memory) override { cpu_->release(memory); }
    Streams* streams() override { return &streams_; }
    Device& host() override { return *cpu_; }
    void upload(const Tensor& to, const void* from) override {
        uploads.push_back({streams_.work(), to.data});
        cpu_->upload(to, from);
    }
    void download(void* to, const Tensor& from) override { cpu_->download(to, from); }
    void begin_download(void* to, const Tensor& from) override { cpu_->download(to, from); }
    HostMemory host_memory(std::size_t bytes) override { return cpu_->host_memory(bytes); }
    void synchronize() override {}
    Ops& ops() override { return cpu_->ops(); }
    const DeviceSizes& sizes() const override { return cpu_->sizes(); }

    FakeStreams& fake() { return streams_; }
    struct Upload {
        std::size_t place;
        const std::byte* to;
    };
    std::vector<Upload> uploads;

  private:
    std::unique_ptr<Device> cpu_ = make_cpu_device(1);
    FakeStreams streams_;
};

// A ring of two buffers, for one micro-batch in flight.
struct Ring {
    Ring() : memory(4 * B * T) {
        for (std::size_t i = 0; i < 2; ++i) buffers.push_back({at(2 * i), at(2 * i + 1)});
    }
    Tensor at(std::size_t i) {
        return {reinterpret_cast<std::byte*>(memory.data() + i * B * T), DType::int32, {B, T}};
    }
    std::vector<std::int32_t> memory;
    std::vector<TokenBuffers<Tensor>> buffers;
};

TokenFeed::Fill filling(std::int32_t value) {
    return [value](std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
        std::ranges::fill(inputs, value);
        std::ranges::fill(targets, -value);
    };
}

void expect_tokens(const TokenBuffers<Tensor>& tokens, std::int32_t value) {
    for (const std::int32_t token : tokens.inputs.span<std::int32_t>()) EXPECT_EQ(token, value);
    for (const std::int32_t token : tokens.targets.span<std::int32_t>()) EXPECT_EQ(token, -value);
}

TEST(TokenFeed, WhatComesAheadIsCopiedBesideAndWaitedFor) {
    StreamDevice device;
    Ring ring;
    TokenFeed feed(device, ring.buffers, 2);
    struct Use {
        std::size_t place;
        const std::byte* tokens;
    };
    std::vector<Use> uses;
    for (int micro_batch = 0; micro_batch < 6; ++micro_batch) {
        const auto tokens = feed.load(BatchPlace{1, micro_batch}, B, filling(micro_batch));
        expect_tokens(tokens, micro_batch);
        feed.bring_ahead({1, micro_batch + 1}, B, filling(micro_batch + 1));
        EXPECT_EQ(device.fake().selected(), StreamKind::compute);
        expect_tokens(tokens, micro_batch);  // still the same tokens
        uses.push_back({device.fake().work(), tokens.inputs.data});
    }
    ASSERT_EQ(device.uploads.size(), 14u);
    for (std::size_t i = 0; i < device.uploads.size(); ++i) {
        const auto& upload = device.uploads[i];
        EXPECT_EQ(device.fake().stream_of(upload.place), i < 2 ? StreamKind::compute : StreamKind::copy);
        for (const Use& use : uses) {
            if (upload.to != use.tokens) continue;
            // Both directions keep the order in which the host issued them.
            if (upload.place < use.place) {
                EXPECT_TRUE(device.fake().is_before(upload.place, use.place));
            } else {
                EXPECT_TRUE(device.fake().is_before(use.place, upload.place));
            }
        }
    }
    EXPECT_GT(device.fake().host_waits(), 0u)
        << "the host fills a buffer again only after it has been copied";
}

TEST(TokenFeed, SomethingElseMayComeBetween) {
    StreamDevice device;
    Ring ring;
    TokenFeed feed(device, ring.buffers, 2);
    expect_tokens(feed.load(BatchPlace{1, 0}, B, filling(1)), 1);
    feed.bring_ahead({2, 0}, B, filling(2));
    expect_tokens(feed.load(std::nullopt, 1, filling(3)), 3);  // a validation of one sequence
    expect_tokens(feed.load(BatchPlace{2, 0}, B, filling(2)), 2);
    feed.bring_ahead({3, 0}, B, filling(3));
    expect_tokens(feed.load(BatchPlace{7, 0}, B, filling(7)), 7);
}

TEST(TokenFeed, WithoutStreamsNothingComesAhead) {
    const auto device = make_cpu_device(1);
    Ring ring;
    TokenFeed feed(*device, ring.buffers, 2);
    feed.bring_ahead({1, 0}, B, [](auto, auto) { FAIL(); });
    expect_tokens(feed.load(BatchPlace{1, 0}, B, filling(5)), 5);
}

}  // namespace
}  // namespace llmc
