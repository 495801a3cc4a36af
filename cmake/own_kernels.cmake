# Kernels of the user's own, outside of this repository: sets own_kernel_sources. docs/own-kernels.md describes them.
set(HYPERMLA_KERNELS "$ENV{HYPERMLA_KERNELS}"
    CACHE PATH "A directory `kernels` of your own, laid out as the one here is")
set(own_kernel_sources "")
if(HYPERMLA_KERNELS)
  if(NOT IS_ABSOLUTE "${HYPERMLA_KERNELS}" OR NOT IS_DIRECTORY "${HYPERMLA_KERNELS}"
     OR NOT HYPERMLA_KERNELS MATCHES "/kernels/?$")
    message(FATAL_ERROR "HYPERMLA_KERNELS=${HYPERMLA_KERNELS} is no absolute path of a directory of the name kernels; "
                        "make it, or unset the variable")
  endif()
  # What is built here runs as this user, so nobody else may write it; the program looks again before it runs a kernel.
  execute_process(COMMAND id -u OUTPUT_VARIABLE user OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND find "${HYPERMLA_KERNELS}" ( -type l -o -perm /022 -o -not ( -uid ${user} -o -uid 0 ) )
                          -print -quit
                  OUTPUT_VARIABLE untrusted OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(untrusted)
    message(FATAL_ERROR "${untrusted} is a link, or other users may write it: they could put code there that would run "
                        "as you; replace it, or run `chmod -R go-w ${HYPERMLA_KERNELS}`")
  endif()
  file(GLOB_RECURSE own_kernel_sources CONFIGURE_DEPENDS "${HYPERMLA_KERNELS}/*.cpp")
  foreach(source IN LISTS own_kernel_sources)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY "${HYPERMLA_KERNELS}" OUTPUT_VARIABLE below)
    if(EXISTS "${PROJECT_SOURCE_DIR}/kernels/${below}")
      message(FATAL_ERROR "${source} has the name of a version of HyperMLA; clone that under another number")
    endif()
  endforeach()
endif()
