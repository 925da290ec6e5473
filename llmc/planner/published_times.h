// How far the steps that others published are from the rates of benchmarks (docs/published_steps.tsv). Their software
// differs more than their hardware does, so a plan has an expectation and a range.
#pragma once

#include <optional>
#include <string>

#include "llmc/core/dtype.h"
#include "llmc/device/gpu_table.h"
#include "llmc/parallel/mesh.h"
#include "llmc/plan/step_time.h"

namespace llmc {

// How many times as long as at the rates of benchmarks (machines.h) each part of a published step takes, by the
// generation of the GPU and by whether products have 8 bits. scripts/plan_error.py --fit says by how much they should
// change.
TimeParts published_times(const GpuModel& gpu, bool is_fp8);

// Where 80% of the published steps lay, as multiples of the expectation.
struct PublishedRange {
    double low, high;
    int steps;
    std::string of;  // which steps: "40 published steps on Hopper in 16 bits, data-parallel alone"
};
// Of this generation, format and kind of mesh; below five steps, of the next wider class. None if nobody has published
// a step of this generation.
std::optional<PublishedRange> published_range(const GpuModel& gpu, DType dtype, bool is_fp8,
                                              const Mesh& mesh);

}  // namespace llmc
