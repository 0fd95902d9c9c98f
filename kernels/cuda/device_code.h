#pragma once

namespace kdtree {

// Whether this build has machine code for the current device.
bool has_device_code();

}  // namespace kdtree
