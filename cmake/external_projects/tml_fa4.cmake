# SPDX-License-Identifier: Apache-2.0
# FlashAttention 4 with sheared relative bias, for compute capability 10.x and 11.x.
#
# The architecture constants of vllm/models/inkling/nvidia/ops/fa4_rel_attention.py describe
# this commit: change both together. Nothing is fetched unless VLLM_BUILD_TML_FA4 is ON.

set(VLLM_TML_FA4_REPOSITORY "https://github.com/vllm-project/tml-fa4.git"
    CACHE STRING "Where the tml-fa4 sources come from")
set(VLLM_TML_FA4_TAG "13374f0c855acc1add1bf30444bd67aebbc24a8e"
    CACHE STRING "Commit of tml-fa4 that the capability constants follow")
option(VLLM_BUILD_TML_FA4 "Fetch tml-fa4 and install it beside vllm" OFF)

if(VLLM_BUILD_TML_FA4)
  include(FetchContent)
  # The kernels are Python (CuTe DSL), compiled on first use, so that only files are copied.
  FetchContent_Declare(tml_fa4
    GIT_REPOSITORY "${VLLM_TML_FA4_REPOSITORY}"
    GIT_TAG "${VLLM_TML_FA4_TAG}"
    SOURCE_SUBDIR none)
  FetchContent_MakeAvailable(tml_fa4)
  install(DIRECTORY "${tml_fa4_SOURCE_DIR}/flash_attn/cute/" DESTINATION tml_fa4
    FILES_MATCHING PATTERN "*.py")
endif()
