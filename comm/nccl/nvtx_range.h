// Marks a collective for Nsight Systems; costs next to nothing where no profiler is attached.
#pragma once

#include <nvtx3/nvToolsExt.h>

#include <array>

#include "comm/communicator.h"

namespace kdtree {

// Named "all_reduce_sum moe layer 3", in domain "kdtree", from construction to destruction.
class NvtxRange {
 public:
  NvtxRange(const char* call, CollectiveLabel label) {
    std::array<char, 128> text{};
    const auto room = static_cast<std::ptrdiff_t>(text.size() - 1);
    if (label.layer >= 0) {
      fmt::format_to_n(text.data(), room, "{} {} layer {}", call, label.what, label.layer);
    } else {
      fmt::format_to_n(text.data(), room, "{} {}", call, label.what);
    }
    nvtxEventAttributes_t attributes{};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = text.data();
    nvtxDomainRangePushEx(domain(), &attributes);
  }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
  ~NvtxRange() { nvtxDomainRangePop(domain()); }

 private:
  static nvtxDomainHandle_t domain() {
    static const nvtxDomainHandle_t handle = nvtxDomainCreateA("kdtree");
    return handle;
  }
};

}  // namespace kdtree
