"""Time training steps of TensorFlow with oneDNN on 2 threads; print one JSON line. Started by
compare.py."""

import argparse
import json
import statistics
import time

import tensorflow as tf
from compare import STAGES, STEP_BATCH

keras = tf.keras
RATE, MOMENTUM, DECAY = 0.1, 0.9, 1e-4


def conv_norm(x: tf.Tensor, channels: int, kernel: int, stride: int = 1) -> tf.Tensor:
    """Return x after a convolution, padded as in PyTorch, and BatchNorm."""
    if kernel > 1:
        x = keras.layers.ZeroPadding2D(kernel // 2)(x)
    x = keras.layers.Conv2D(channels, kernel, stride, use_bias=False)(x)
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)


def unit(x: tf.Tensor, channels: int, stride: int, has_projection: bool) -> tf.Tensor:
    """Return x after a bottleneck block of ResNet v1.5."""
    relu = keras.layers.ReLU
    body = relu()(conv_norm(relu()(conv_norm(x, channels, 1)), channels, 3, stride))
    shortcut = conv_norm(x, 4 * channels, 1, stride) if has_projection else x
    return relu()(keras.layers.Add()([conv_norm(body, 4 * channels, 1), shortcut]))


def make_network(num_classes: int) -> keras.Model:
    images = keras.Input((224, 224, 3))
    x = keras.layers.ZeroPadding2D(1)(keras.layers.ReLU()(conv_norm(images, 64, 7, 2)))
    x = keras.layers.MaxPooling2D(3, 2)(x)
    for channels, num_units, stride in STAGES:
        for i in range(num_units):
            x = unit(x, channels, stride if i == 0 else 1, i == 0)
    x = keras.layers.Dense(num_classes)(keras.layers.GlobalAveragePooling2D()(x))
    return keras.Model(images, keras.layers.Activation('linear', dtype='float32')(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--precision', choices=['float32', 'bfloat16'], required=True)
    parser.add_argument('--warmup-steps', type=int, required=True)
    parser.add_argument('--steps', type=int, required=True)
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(2)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.mixed_precision.set_global_policy(
        'mixed_bfloat16' if options.precision == 'bfloat16' else 'float32'
    )
    net = make_network(1000)
    weights = [w.value for w in net.trainable_weights]
    velocities = [tf.Variable(tf.zeros_like(w)) for w in weights]

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(y, net(x, training=True))
            )
        for weight, velocity, gradient in zip(weights, velocities, tape.gradient(loss, weights)):
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=weight.handle,
                accum=velocity.handle,
                lr=RATE,
                grad=gradient + DECAY * weight,
                momentum=MOMENTUM,
            )
        return loss

    x, y = tf.random.uniform((STEP_BATCH, 224, 224, 3)), tf.range(STEP_BATCH)
    seconds = []
    for _ in range(options.warmup_steps + options.steps):
        start = time.perf_counter()
        step(x, y).numpy()
        seconds.append(time.perf_counter() - start)
    step_s = statistics.median(seconds[options.warmup_steps :])
    print(json.dumps({'images_per_s': STEP_BATCH / step_s}))


if __name__ == '__main__':
    main()
