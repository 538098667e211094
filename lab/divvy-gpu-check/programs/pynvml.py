import json, os
import pynvml

pynvml.nvmlInit()
uuid = os.environ.get("CUDA_VISIBLE_DEVICES", "")
gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else pynvml.nvmlDeviceGetHandleByIndex(0)
name = pynvml.nvmlDeviceGetName(gpu)
print(json.dumps({"same": [str(name)], "total": pynvml.nvmlDeviceGetMemoryInfo(gpu).total}))
