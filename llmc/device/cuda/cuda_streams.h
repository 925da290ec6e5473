// Implements Streams (device/device.h) with CUDA's streams and events.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "llmc/device/cuda/runtime.h"
#include "llmc/device/device.h"

namespace llmc::cuda {

// A wait of the host for the device.
enum class HostWait { begins, goes_on, ends };

class CudaStreams final : public Streams {
  public:
    CudaStreams();

    void select(StreamKind stream) override { selected_ = stream; }
    int new_event() override { return add_event(false); }
    int new_timed_event() override { return add_event(true); }
    void record(int event) override;
    void wait(int event) override;
    void wait_on_host(int event) override;
    double milliseconds(int from, int to) override;

    // Adds a function that is called now and then while the host waits for the device, unless the wait is
    // short. It may end the process. It must not throw: an exception would free memory that the device still
    // uses. Returns a number for remove_watch().
    using Watch = std::function<void(HostWait)>;
    int add_watch(Watch watch);
    void remove_watch(int number) { watches_.erase(number); }
    // The number of events that are complete or were never recorded. During a long wait no new events are
    // recorded. If this number changes, a watch knows that the device makes progress.
    std::ptrdiff_t count_reached() const;
    // wait_until_empty() waits until the selected stream is empty and returns CUDA's error. finish() does the
    // same but throws the error. finish_all() finishes all streams.
    cudaError_t wait_until_empty();
    void finish();
    void finish_all();

    cudaStream_t selected() const { return stream(selected_); }
    cudaStream_t stream(StreamKind kind) const { return streams_[static_cast<std::size_t>(kind)]->get(); }

  private:
    int add_event(bool has_time);
    cudaError_t reach(int event);
    void call_watches(HostWait wait) const;
    cudaEvent_t native(int event) const { return events_[static_cast<std::size_t>(event)]->get(); }

    std::array<std::unique_ptr<StreamOwner>, all_streams.size()> streams_;  // by StreamKind
    std::vector<std::unique_ptr<EventOwner>> events_;
    StreamKind selected_ = StreamKind::compute;
    int finished_;  // event
    std::map<int, Watch> watches_;
};

}  // namespace llmc::cuda
