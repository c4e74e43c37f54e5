// SPDX-License-Identifier: GPL-2.0
/* Refuses userfaultfd by a probe in the function that takes a mapping. pt_userfault.h says why. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/kprobes.h>
#include <linux/mm.h>
#include <linux/static_call.h>

#include "core/compat.h"
#include "core/pt_mount.h"
#include "core/pt_symbol.h"
#include "core/pt_userfault.h"

#define PT_USERFAULT_PROBED	"vma_modify_flags_uffd"

/* For kernels where userfaultfd does not take the module's mappings. */
static struct vm_area_struct *pt_userfault_refused(struct vma_iterator *iterator,
						   struct vm_area_struct *previous,
						   struct vm_area_struct *vma, unsigned long start,
						   unsigned long end, unsigned long flags,
						   struct vm_userfaultfd_ctx context)
{
	return ERR_PTR(-EINVAL);
}

/* The kernel's function, with the probe in it. */
DEFINE_STATIC_CALL(vellum_probed, pt_userfault_refused);

static bool pt_userfault_is_placed = true;

/* Runs in place of the kernel's function, with its arguments. */
static noinline notrace struct vm_area_struct *pt_userfault_refuse(void)
{
	return ERR_PTR(-EINVAL);
}

static bool pt_userfault_is_ours(const struct vm_area_struct *vma)
{
	return vma->vm_ops && vma->vm_ops->may_split == pt_mount_vm_may_split;
}

static int pt_userfault_look(struct kprobe *probe, struct pt_regs *regs)
{
	const struct vm_area_struct *vma = (void *)regs_get_kernel_argument(regs, 2);

	if (!pt_userfault_is_ours(vma))
		return 0;
	instruction_pointer_set(regs, (unsigned long)pt_userfault_refuse);
	return 1;
}

/* Without this handler the core would optimise the probe, which then could not change the flow. */
static void pt_userfault_after(struct kprobe *probe, struct pt_regs *regs, unsigned long flags)
{
}

/*
 * Only userfaultfd calls the function, to begin or to end. An end never concerns a mapping of the
 * module.
 */
static struct kprobe pt_userfault_probe = {
	.symbol_name = PT_USERFAULT_PROBED,
	.pre_handler = pt_userfault_look,
	.post_handler = pt_userfault_after,
};

void pt_userfault_init(void)
{
	void *probed;

	if (!pt_userfault_takes_all())
		return;
	probed = pt_symbol_find(PT_USERFAULT_PROBED);
	pt_userfault_is_placed = probed && !register_kprobe(&pt_userfault_probe);
	if (pt_userfault_is_placed)
		static_call_update(vellum_probed, probed);
	else
		pr_warn("cannot refuse userfaultfd: nothing can be mapped\n");
}

void pt_userfault_exit(void)
{
	if (pt_userfault_probe.addr && pt_userfault_is_placed)
		unregister_kprobe(&pt_userfault_probe);
}

/*
 * All probes can be switched off at once, and do not notice it (debugfs, kernel.ftrace_enabled). So
 * this calls the function for a mapping that looks like one of the module's. If the function itself
 * ran, it would do nothing: the mapping is special, and all of it keeps the flags that it has.
 */
bool pt_userfault_is_refused(struct mm_struct *mm)
{
	static const struct vm_operations_struct ours = { .may_split = pt_mount_vm_may_split };
	struct vm_area_struct vma = { .vm_mm = mm, .vm_end = PAGE_SIZE, .vm_ops = &ours };
	struct vma_iterator iterator;
	struct vm_area_struct *answer;

	if (!pt_userfault_is_placed)
		return false;
	mmap_assert_write_locked(mm);
	vma_iter_init(&iterator, mm, 0);
	pt_vma_init_flags(&vma, VM_SHARED | VM_PFNMAP | VM_IO);
	answer = static_call(vellum_probed)(&iterator, NULL, &vma, vma.vm_start, vma.vm_end,
					    vma.vm_flags, NULL_VM_UFFD_CTX);
	return answer == ERR_PTR(-EINVAL);
}
