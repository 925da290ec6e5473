// What the device decides of the options, and the formats of numbers that it has.
#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/train/options.h"

namespace llmc {

Options for_device(Options o, DeviceKind device) {
    const bool cuda = device == DeviceKind::cuda;
    o.device = cuda ? "cuda" : "cpu";
    if (o.dtype.empty()) o.dtype = cuda ? "bf16" : "fp32";
    // A setting, or the level of --precision that set it, for messages
    const auto named = [&](const char* name, std::string_view value) {
        return o.of_precision.contains(name) ? fmt::format("--precision {}", o.precision)
                                             : fmt::format("--{} {}", name, value);
    };
    if (o.dtype != "bf16" && o.gradient_dtype == "bf16") {
        user_error("--gradient-dtype bf16 needs --dtype bf16, but --dtype is {}; try --dtype bf16", o.dtype);
    }
    if (o.dtype != "bf16" && o.master_dtype == "none")
        user_error("{} needs --dtype bf16, but --dtype is {}; try --dtype bf16",
                   named("master-dtype", "none"), o.dtype);
    if (o.master_dtype == "none" && !o.stochastic_rounding && o.is_given("stochastic-rounding") &&
        !o.inherited.contains("stochastic-rounding"))
        user_error("--master-dtype none rounds weights stochastically; leave out --stochastic-rounding");
    if (o.generate) o.fp8 = "none";  // it is for training
    if (o.dtype != "bf16" && o.fp8 != "none")
        user_error("{} needs --dtype bf16, but --dtype is {}; try --dtype bf16", named("fp8", o.fp8),
                   o.dtype);
    if (cuda && o.fp8 == "current")
        user_error("--fp8 current computes on the CPU only; give --fp8 delayed, or --device cpu");
    if (o.dtype != "bf16" && o.stochastic_rounding) {
        user_error("--stochastic-rounding rounds weights to bf16, but --dtype is {}; try --dtype bf16",
                   o.dtype);
    }
    if (o.generate) o.offload_optimizer = "none";  // there is no state
    for (const auto& [name, tier] :
         {std::pair("optimizer", o.offload_optimizer), std::pair("parameters", o.offload_parameters)}) {
        if (tier == "nvme" && o.nvme_dir.empty())
            user_error("--offload-{} nvme needs the disk's directory; add --nvme-dir DIR", name);
    }
    if (("," + o.nvme_dir + ",").find(",,") != std::string::npos && !o.nvme_dir.empty())
        user_error("--nvme-dir '{}' has a directory without a name; give DIR, or DIR,DIR", o.nvme_dir);
    // The CPU device's memory is that of the host.
    const auto is_offloaded = [&](std::string_view tier) {
        return tier == "nvme" || (tier == "cpu" && cuda);
    };
    if (is_offloaded(o.offload_parameters) && !o.reshard_after_forward)
        user_error(
            "--offload-parameters {} brings parameters for each pass; leave out "
            "--reshard-after-forward=false",
            o.offload_parameters);
    // Each token of a sample would bring all parameters.
    if (is_offloaded(o.offload_parameters) && !o.generate && !o.is_given("sample-tokens"))
        o.sample_tokens = 0;
    if (is_offloaded(o.offload_optimizer) && o.moments_dtype == "8bit")
        user_error("--offload-optimizer {} keeps moments in fp32 or bf16; give --moments-dtype bf16",
                   o.offload_optimizer);
    if (!cuda) {  // a run on GPUs may go on here
        if (o.inherited.contains("attention")) o.attention = Options().attention;
        if (o.inherited.contains("tf32")) o.tf32 = Options().tf32;
    }
    const auto require_gpu = [&](bool given, std::string_view option) {
        if (given && !cuda)
            user_error("{} needs a GPU, but this run computes on the CPU; leave it out, or try --device cuda",
                       option);
    };
    require_gpu(o.attention == "cudnn", "--attention cudnn");
    require_gpu(o.tf32, o.of_precision.contains("tf32") ? "--precision tf32" : "--tf32");
    require_gpu(o.cuda_sync, "--cuda-sync");
    require_gpu(o.share_gpu, "--share-gpu");
    if (o.attention == "cudnn" && o.dtype != "bf16")
        user_error("--attention cudnn needs --dtype bf16, but --dtype is {}; try --attention flash", o.dtype);
    if (o.tf32 && o.dtype != "fp32")
        user_error("--tf32 needs --dtype fp32, but --dtype is {}; leave it out", o.dtype);
    return o;
}

}  // namespace llmc
