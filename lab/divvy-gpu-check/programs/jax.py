import json
import jax, jax.numpy as jnp

x = jnp.arange(1 << 20, dtype=jnp.float32).reshape(1024, 1024)
print(json.dumps({"same": [jax.__version__, jax.devices()[0].platform, float((x @ x.T).sum())]}))
