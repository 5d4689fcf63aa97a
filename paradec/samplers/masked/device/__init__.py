"""Steps of masked samplers that run entirely on the device, in fixed shapes."""
