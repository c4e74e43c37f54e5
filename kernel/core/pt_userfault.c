// SPDX-License-Identifier: GPL-2.0
/* Userfaultfd is refused by a probe where it takes a mapping. See pt_userfault.h. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/kprobes.h>
#include <linux/mm.h>

#include "core/compat.h"
#include "core/pt_mount.h"
#include "core/pt_userfault.h"

static bool is_refused = true;

/* Is entered in place of the kernel's function, with its arguments. */
static noinline notrace struct vm_area_struct *refuse(void)
{
	return ERR_PTR(-EINVAL);
}

static bool is_ours(const struct vm_area_struct *vma)
{
	return vma->vm_ops && vma->vm_ops->may_split == pt_mount_vm_may_split;
}

static int look(struct kprobe *probe, struct pt_regs *regs)
{
	const struct vm_area_struct *vma = (void *)regs_get_kernel_argument(regs, 2);

	if (!is_ours(vma))
		return 0;
	instruction_pointer_set(regs, (unsigned long)refuse);
	return 1;
}

/* A probe with nothing to do afterwards would not be allowed to lead elsewhere. */
static void after(struct kprobe *probe, struct pt_regs *regs, unsigned long flags)
{
}

/* Nothing but userfaultfd calls it, to begin or to end: the latter never concerns ours. */
static struct kprobe probe = {
	.symbol_name = "vma_modify_flags_uffd",
	.pre_handler = look,
	.post_handler = after,
};

void pt_userfault_init(void)
{
	if (!userfault_takes_all())
		return;
	is_refused = !register_kprobe(&probe);
	if (!is_refused)
		pr_warn("userfaultfd cannot be kept away: nothing will be mapped\n");
}

void pt_userfault_exit(void)
{
	if (probe.addr && is_refused)
		unregister_kprobe(&probe);
}

bool pt_userfault_is_refused(void)
{
	return is_refused;
}
