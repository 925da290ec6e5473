// Learning-rate schedules: linear warmup, then constant, cosine, linear, or warmup-stable-decay.
#pragma once

#include <cstdint>
#include <string_view>

namespace llmc {

enum class ScheduleKind { cosine, linear, constant, wsd };
std::string_view name_of(ScheduleKind kind);

struct Schedule {
    ScheduleKind kind = ScheduleKind::cosine;
    double peak = 0;          // the learning rate after warmup
    double min_fraction = 0;  // the fraction of the peak at the end of the decay
    std::int64_t warmup_steps = 0;
    std::int64_t total_steps = 0;
};

// Steps count from 1. During warmup the rate is peak * step / warmup. After it, with p = (step - 1 - warmup)
// / (total - warmup) in [0, 1) and f = min_fraction, the rate is the peak times
//   constant   1
//   linear     1 - (1 - f) p
//   cosine     f + (1 - f) (1 + cos(pi p)) / 2
//   wsd        1, and over the steps of the last fifth linear down to f, in the last one (Hu et al., MiniCPM, 2024)
// The first step after warmup thus has the full rate, as with PyTorch's LinearLR, CosineAnnealingLR and
// SequentialLR. Steps beyond the total use p = 1.
double learning_rate(const Schedule& schedule, std::int64_t step);

}  // namespace llmc
