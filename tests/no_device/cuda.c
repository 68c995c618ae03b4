/* The CUDA driver's part that torch and Triton look up when they start, of a device that is not there. */
#define ANSWERS_NOTHING(name) int name(void) { return 0; }

int cuDevicePrimaryCtxGetState(int device, unsigned int *flags, int *active) {
  *flags = 0;
  *active = 1;
  return 0;
}
int cuDeviceGetAttribute(int *value, int which, int device) { *value = 0; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "there is no device"; return 0; }
ANSWERS_NOTHING(cuCtxGetCurrent)
ANSWERS_NOTHING(cuCtxGetDevice)
ANSWERS_NOTHING(cuCtxGetLimit)
ANSWERS_NOTHING(cuCtxSetCurrent)
ANSWERS_NOTHING(cuCtxSetLimit)
ANSWERS_NOTHING(cuDeviceGet)
ANSWERS_NOTHING(cuDevicePrimaryCtxRetain)
ANSWERS_NOTHING(cuDriverGetVersion)
ANSWERS_NOTHING(cuFuncGetAttribute)
ANSWERS_NOTHING(cuFuncSetAttribute)
ANSWERS_NOTHING(cuFuncSetCacheConfig)
ANSWERS_NOTHING(cuModuleGetFunction)
ANSWERS_NOTHING(cuModuleLoadData)
ANSWERS_NOTHING(cuModuleUnload)
ANSWERS_NOTHING(cuPointerGetAttribute)
