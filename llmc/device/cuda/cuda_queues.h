// The device's queues as CUDA streams, and marks as events.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "llmc/device/cuda/runtime.h"
#include "llmc/device/queues.h"

namespace llmc::cuda {

// A wait of the host for the device.
enum class HostWait { begins, goes_on, ends };

class CudaQueues final : public Queues {
  public:
    CudaQueues();

    void select(StreamKind stream) override { selected_ = stream; }
    int new_mark() override;
    void set(int mark) override;
    void wait(int mark) override;
    void wait_on_host(int mark) override;
    double milliseconds(int from, int to) override;

    // While the host waits for the device, all watches are called now and then, unless the wait is short. They may end
    // the process; an exception would have memory freed that the device is still using. Returns a number, by which a
    // watch is removed.
    using Watch = std::function<void(HostWait)>;
    int add_watch(Watch watch);
    void remove_watch(int number) { watches_.erase(number); }
    // So many marks are reached, or were never set. In a long wait, where nobody sets any, a watch sees by it whether
    // something moves.
    std::ptrdiff_t count_reached() const;
    // The host waits until the selected queue is empty, or all of them; what went wrong there, as CUDA says it.
    cudaError_t wait_until_empty();
    void finish();
    void finish_all();

    cudaStream_t selected() const { return stream(selected_); }
    cudaStream_t stream(StreamKind kind) const { return streams_[static_cast<std::size_t>(kind)]->get(); }

  private:
    cudaError_t reach(int mark);
    void call_watches(HostWait wait) const;
    cudaEvent_t event(int mark) const { return marks_[static_cast<std::size_t>(mark)]->get(); }

    std::array<std::unique_ptr<StreamOwner>, all_streams.size()> streams_;  // by StreamKind
    std::vector<std::unique_ptr<EventOwner>> marks_;
    StreamKind selected_ = StreamKind::compute;
    int finished_;  // mark
    std::map<int, Watch> watches_;
};

}  // namespace llmc::cuda
